"""The nouns of the design: tiers, tags, spans and plans. Knows nothing of tensors, models or storage."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

PAGE_SIZE = 32
"""Consecutive positions of one sequence that share a tier: the quantization group of K's channels and the unit of reuse."""


class Tier(IntEnum):
    """Mean bits that a K or V element keeps, which is also the number of 2-bit planes of a quantized page."""

    EVICTED = 0
    INT2 = 2
    INT3 = 3
    INT4 = 4
    INT8 = 8
    BF16 = 16

    @classmethod
    def parse(cls, name: "str | int | Tier") -> "Tier":
        """Tier of a name (`"INT4"`, any case) or of its bits (4). Raises ValueError, naming the accepted ones."""
        if isinstance(name, str) and name.strip().upper() in cls.__members__:
            return cls[name.strip().upper()]
        # looked up, not converted: other scripts' digits and endless ones are no numbers of bits
        by_bits = {str(t.value): t for t in cls}
        if str(name).strip() in by_bits:
            return by_bits[str(name).strip()]
        raise ValueError(f"unknown tier {name!r}; accepted: {', '.join(f'{t.name} ({t.value})' for t in cls)}")

    @property
    def k_planes(self) -> int:
        """2-bit planes of K; 0 where the tier is not made of planes."""
        return {2: 1, 3: 2, 4: 2, 8: 4}.get(self.value, 0)

    @property
    def v_planes(self) -> int:
        """2-bit planes of V; 0 where the tier is not made of planes."""
        return {2: 1, 3: 1, 4: 2, 8: 4}.get(self.value, 0)


class Age(IntEnum):
    """Turns since a token was written: the temporal axis (TriAxialKV)."""

    CURRENT = 0
    M1 = 1
    M2 = 2
    OLDER = 3


class Modality(StrEnum):
    TEXT = "text"
    IMAGE = "image"


class Role(StrEnum):
    """What a token is in an agent's conversation: the semantic axis (TriAxialKV)."""

    INST = "inst"
    USER = "user"
    ASSISTANT = "assistant"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    OBS = "obs"
    DELIM = "delim"


@dataclass(frozen=True, slots=True)
class Tag:
    age: Age
    modality: Modality
    role: Role


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of one role and modality, written in user turn `turn` (0 before the first user message)."""

    start: int
    end: int
    role: Role
    turn: int
    modality: Modality = Modality.TEXT

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"span [{self.start}, {self.end}) is empty or negative; start must be >= 0 and end > start")

    def tag(self, current_turn: int) -> Tag:
        return Tag(Age(min(max(current_turn - self.turn, 0), Age.OLDER)), self.modality, self.role)


SCORES = ("mass", "linear")
"""How a key's attention is scored. mass: softmax probabilities, summed. linear: HyQuant's proxy, the mean query times each key."""


PREFILLS = (None, "int8", "fp8")


def check_score(score: str) -> str:
    if score not in SCORES:
        raise ValueError(f"score is {score!r}; accepted: {', '.join(SCORES)}")
    return score


@dataclass(frozen=True, slots=True)
class Anchors:
    """Tokens that each layer and KV head keeps at `tier`, chosen by the newest queries' attention (ops/score.py): at most `count` for each
    layer and head. refresh: they are chosen anew once that many tokens came since they were chosen, and by each step of several tokens, as
    a turn begins with; 0: never, once they are there. alone: of quantized pages nothing else is attended, which is an ablation, for
    no bytes are freed. prefill: the first prompt attends itself in 8 bits, but for as many lines and the window (ops/prefill.py): "int8" or
    "fp8", the format of Q·K; None: in full precision."""

    count: int
    tier: Tier = Tier.BF16
    score: str = "mass"
    refresh: int = 64
    alone: bool = False
    prefill: str | None = None

    def __post_init__(self) -> None:
        if self.prefill not in PREFILLS:
            raise ValueError(f"prefill is {self.prefill!r}; accepted: {', '.join(map(repr, PREFILLS))}")
        for name, value in (("count of anchors", self.count), ("refresh", self.refresh)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; accepted: a whole number of tokens, 0 or more")
        if not isinstance(self.alone, bool):
            raise ValueError(f"alone is {self.alone!r}; accepted: True, False")
        if self.tier is Tier.EVICTED:
            raise ValueError("anchors have tier EVICTED; accepted: any other")
        check_score(self.score)


SELECTORS = ("intent", "received", "newest", "recent", "random")
"""How survivors are chosen. intent: by the attention that the session's remembered queries would pay (IntentKV). received: by the attention
that tokens got so far (H2O). newest: by that of the newest queries (SnapKV). recent: the newest tokens (StreamingLLM). random: by a hash
of the position."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Tokens [start, end) that say what a session is after: a request, a call. turn: the user turn that they belong to."""

    start: int
    end: int
    turn: int


@dataclass(frozen=True, slots=True)
class Thinning:
    """Which tokens of settled pages live on, once there are more than `count` + `slack` of them, or they take more than `pages` pages: for
    each layer and KV head the `count` with the highest score, gathered into pages of their own at `tier`; what they came from is evicted.

    spared: pages that are left as they are. score: one of SELECTORS. per_head: False chooses one set for all layers and heads. repack:
    False leaves survivors where they are, others masked, which frees pages of none alone; for one set only, as a page has one mask.
    renumber: as engines have it that compact a cache: what lies behind the first token that went has another number now, so the next
    request does not find it where its tokens say, and computes it again.
    staging: tier at which pages settle that may be thinned, and wait so for the choice, for what is gathered is quantized again; None =
    their own. Where the arena has no frames for that they settle at `tier`.
    For score intent: asks, what is remembered; decay, by how much less a turn later; rope, whether a remembered query counts as if it were
    asked now (moved) or where it stood (asked); pool, whether a key counts for the most that a query pays it (max) or for the sum (sum);
    residual, file of a trained head whose score is added (ops/residual.py), None = none; tags, for the head, age and role of each token as
    bytes, role * 4 + age by the codes of policy/tags.py.
    """

    count: int
    pages: int
    tier: Tier = Tier.BF16
    spared: frozenset[int] = frozenset()
    score: str = "intent"
    per_head: bool = True
    repack: bool = True
    slack: int = 0
    asks: tuple[Ask, ...] = ()
    decay: float = 0.1
    rope: str = "moved"
    pool: str = "max"
    residual: str | None = None
    tags: bytes = b""
    renumber: bool = False
    staging: Tier | None = None

    def __post_init__(self) -> None:
        for name in ("count", "pages", "slack"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of a thinning is {getattr(self, name)}; it must be 0 or more")
        if self.pages * PAGE_SIZE < self.count:
            raise ValueError(f"{self.pages} pages of {PAGE_SIZE} do not hold {self.count} survivors")
        if self.tier is Tier.EVICTED:
            raise ValueError("survivors have tier EVICTED; accepted: any other")
        if self.score not in SELECTORS:
            raise ValueError(f"score is {self.score!r}; accepted: {', '.join(SELECTORS)}")
        if self.per_head and not self.repack:
            raise ValueError("repack is False and per_head True; a page has one mask for all heads: accepted with per_head False")
        for name, value, accepted in (("rope", self.rope, ("moved", "asked")), ("pool", self.pool, ("max", "sum"))):
            if value not in accepted:
                raise ValueError(f"{name} of a thinning is {value!r}; accepted: {', '.join(accepted)}")
        if not self.decay >= 0:
            raise ValueError(f"decay is {self.decay}; it must be 0 or more a turn")

    @property
    def remembers(self) -> bool:
        """Whether queries of asks are remembered: to choose survivors by, or to weigh pages by."""
        return self.score == "intent" or bool(self.asks)


@dataclass(frozen=True, slots=True)
class Weighing:
    """How the newest queries say what a page is worth, for the next plan. They do as a step ends, when a page that it settles has been
    written: it has `tier` at least until that plan takes planes away again, which moves nothing. Where the arena has no frames for
    that, pages settle at their planned tier. refresh: tokens that are generated before pages are weighed anew, as they are when a turn
    begins. decay: what counts of earlier weights then. intent: the power of what remembered asks would pay a page (Thinning's score
    "intent"), over the mean page, that its weight is multiplied by."""

    tier: Tier = Tier.INT4
    refresh: int = 64
    decay: float = 0.5
    intent: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.refresh, bool) or not isinstance(self.refresh, int) or self.refresh < 1:
            raise ValueError(f"refresh is {self.refresh!r}; accepted: a whole number of tokens, 1 or more")
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 <= self.decay <= 1:
            raise ValueError(f"decay is {self.decay!r}; accepted: 0 to 1")
        if isinstance(self.intent, bool) or not isinstance(self.intent, int | float) or not 0 <= self.intent <= 1:
            raise ValueError(f"intent is {self.intent!r}; accepted: 0 to 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy returns: the tier of each page, and dead tokens inside pages that live on.

    tiers[i] is the tier of page i once it leaves the recent window; pages past the end get `default`.
    dead[i] is a 32-bit mask of page i's dead tokens (bit j = token j of the page); absent = none.
    anchors: how, and how many, tokens of quantized pages are kept at a higher tier besides; None = none.
    thinning: which tokens of settled pages live on where there are too many; None = all.
    weighing: how pages are weighed by the newest queries; None = they are not.
    loss: a token, as the policy counts it, and predicted_kl: nats a token that it was measured to mean; None = the policy does not say.
    """

    tiers: tuple[Tier, ...]
    default: Tier = Tier.INT4
    dead: dict[int, int] = field(default_factory=dict)
    anchors: "Anchors | None" = None
    thinning: "Thinning | None" = None
    weighing: "Weighing | None" = None
    loss: float | None = None
    predicted_kl: float | None = None

    @property
    def coarsest(self) -> Tier:
        """The lowest tier that any page or survivor may have."""
        return min((*self.tiers, *(() if self.thinning is None else (self.thinning.tier,))), default=self.default)

    def tier(self, page: int) -> Tier:
        return self.tiers[page] if page < len(self.tiers) else self.default
