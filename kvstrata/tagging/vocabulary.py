"""Token ids as text in which a special token is one character. Knows nothing of templates or roles.

The automaton reads *units*: each byte of ordinary text is the character of that number (latin-1), and each added token, such as
<|im_start|>, is one character of its own above U+1000. So a marker that a user merely typed out as text never looks like one, a token that
holds half a UTF-8 character is no trouble, and tokenization does not matter: only the text does.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECIAL = 0x1000
"""First character that stands for an added token."""
MAX_PADDING = 1 << 16
"""Ids past a tokenizer's own that are taken for padding rows of the model's table; the rows known here grow up to that."""
_IMAGE = re.compile(r"image|\bimg\b|img_|vision_|video|patch|media_", re.IGNORECASE)
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)


def _byte_decoder() -> dict[str, str]:
    """GPT-2's printable stand-ins -> the byte, as a latin-1 character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {**{chr(b): chr(b) for b in plain}, **{chr(256 + n): chr(b) for n, b in enumerate(rest)}}


class Vocabulary:
    """Units of every token of a tokenizer.

    `units(text)` and `join(ids)` of the same text are equal, unless the tokenizer normalizes text (then `join` is what counts).
    """

    def __init__(self, tokenizer: Any) -> None:
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special or _MARKUP.fullmatch(token.content)}
        size = max([len(tokenizer), *(i + 1 for i in added)])
        self.known = size
        names = tokenizer.convert_ids_to_tokens(list(range(size)))
        known = {name for name in names[:4096] if name}
        byte_level = any("Ġ" in name for name in known)
        decoder = _byte_decoder()
        self.table = [self._piece(name, byte_level, decoder) for name in names]
        self._char = {}
        for n, (i, token) in enumerate(sorted(added.items())):
            self.table[i] = chr(SPECIAL + n)
            self._char[token.content] = chr(SPECIAL + n)
        self._added = {token.content: token for token in added.values()}
        self._split = re.compile("|".join(map(re.escape, sorted(self._char, key=len, reverse=True))) or r"(?!)")
        self.lengths = np.array([len(piece) for piece in self.table], np.int64)
        self.is_image: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.is_image[[i for i, token in added.items() if _IMAGE.search(token.content)]] = True

    @staticmethod
    def _piece(name: str | None, byte_level: bool, decoder: dict[str, str]) -> str:
        if name is None:
            return ""
        if byte_level:
            if all(c in decoder for c in name):
                return "".join(decoder[c] for c in name)
        elif match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
            return chr(int(match[1], 16))
        else:
            name = name.replace("▁", " ")
        return name.encode().decode("latin-1")

    def units(self, text: str) -> str:
        out, end = [], 0
        for match in self._split.finditer(text):
            token = self._added[match[0]]
            before = text[end : match.start()]
            out += [(before.rstrip() if token.lstrip else before).encode().decode("latin-1"), self._char[match[0]]]
            end = match.end()
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
        return "".join([*out, text[end:].encode().decode("latin-1")])

    def text(self, units: str) -> str:
        """Inverse of `units`, for messages to people."""
        names = {char: content for content, char in self._char.items()}
        pieces = (names[c].encode() if ord(c) >= SPECIAL else c.encode("latin-1", "replace") for c in units)
        return b"".join(pieces).decode("utf-8", "replace")

    def check(self, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids as int64 [n]. Those past the table (a model's padding rows) become text of no length. Raises ValueError for a negative one,
        one that no model has (MAX_PADDING past the table), and for what is no list of whole numbers."""
        given = np.asarray(token_ids)
        if given.size and (given.ndim != 1 or given.dtype.kind not in "iu"):
            raise ValueError(f"token ids are {str(token_ids)[:60]}; accepted: a flat list of whole numbers")
        ids = given.reshape(-1).astype(np.int64)
        if ids.size and ids.min() < 0:
            raise ValueError(f"token id {ids.min()} is negative; token ids are >= 0")
        if ids.size and ids.max() >= self.known + MAX_PADDING:
            raise ValueError(f"token id {ids.max()} is none of this tokenizer's; accepted: 0 to {self.known - 1}, and padding rows")
        if ids.size and ids.max() >= len(self.table):
            extra = int(ids.max()) + 1 - len(self.table)
            self.table += [""] * extra
            self.lengths = np.append(self.lengths, np.zeros(extra, np.int64))
            self.is_image = np.append(self.is_image, np.zeros(extra, np.bool_))
        return ids

    def join(self, ids: NDArray[np.int64]) -> str:
        return "".join(map(self.table.__getitem__, ids.tolist()))
