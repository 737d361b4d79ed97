"""The engine's attention backend over frames. It reads neither block tables nor slot mappings: workers keep tables of their own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from kvstrata.adapters.vllm.attention import LayerAttention, StepPlan, StepPlanner
from kvstrata.adapters.vllm.delta import StepDelta
from kvstrata.adapters.vllm.rehearsal import rehearse
from kvstrata.adapters.vllm.rows import DecodeRows
from kvstrata.adapters.vllm.settings import UnsupportedEngineError
from kvstrata.adapters.vllm.tables import Tables
from kvstrata.adapters.vllm.v026.spec import FrameSpec
from kvstrata.ops import decode_cuda
from kvstrata.ops.backend import use_cuda
from kvstrata.ops.decode_cuda import Workspace
from kvstrata.ops.frame import HEAD_DIMS, check_head_dim, frame_bytes
from kvstrata.types import PAGE_SIZE, Tier


class FrameBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["FrameImpl"]:
        return FrameImpl

    @staticmethod
    def get_builder_cls() -> type["FrameBuilder"]:
        return FrameBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [PAGE_SIZE]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE_SIZE

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, frame_bytes(check_head_dim(head_size)))


@dataclass
class FrameMetadata(AttentionMetadata):
    """plan: None in a step of no request that is not one of decoding."""

    plan: StepPlan | None
    spec: FrameSpec
    causal: bool = True


class FrameBuilder(AttentionMetadataBuilder[FrameMetadata]):
    """Keeps the tables of a worker's requests; the plan of a step is made when the step begins."""

    # what decoding rows read stays where it is (rows.py); chunks are planned anew in each step
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    # requests of one token come first
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: FrameSpec, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec = kv_cache_spec
        settings, most = kv_cache_spec.settings, vllm_config.model_config.max_model_len // PAGE_SIZE + 1
        tiers = settings.tiers if settings.tier is None else [t for t in kv_cache_spec.frames() if t <= settings.tier]
        num_pages = dict.fromkeys(tiers, most) | {Tier.BF16: min(settings.sinks, most)}
        tables = Tables(vllm_config.scheduler_config.max_num_seqs, num_pages, kv_cache_spec.frames(), settings.group, device)
        model = vllm_config.model_config
        heads, workspace = model.get_num_attention_heads(vllm_config.parallel_config), None
        if device.type == "cuda":
            workspace = self._workspace(tables.num_slots, heads, model.dtype)
        self._plan: StepPlan | None = None
        self._attention = LayerAttention(kv_cache_spec.head_size, kv_cache_spec.dense_dtype, 0.0)
        self.planner = StepPlanner(tables, DecodeRows(tables, workspace))
        if device.type == "cuda":
            frame = kv_cache_spec.layout.head_frame_bytes
            rehearse(self._attention, tables, heads, kv_cache_spec.num_kv_heads, frame, model.dtype, workspace)

    def _workspace(self, num_rows: int, heads: int, dtype: torch.dtype) -> Workspace | None:
        """Of the kernel that decodes here, if it takes one: made before any graph is captured. The layers take turns at it."""
        spec = self.spec
        q = torch.empty(num_rows, heads, spec.head_size, dtype=dtype, device=self.device)
        takes = use_cuda(q) and decode_cuda.supports(q, spec.num_kv_heads, spec.dense_dtype)
        return decode_cuda.make_workspace(q, spec.num_kv_heads) if takes else None

    def begin_step(self, delta: StepDelta, finished: Iterable[str], order: list[str], new: dict[str, int], arenas: list[Tensor]) -> None:
        """Take over a step's pages, settle what the last one completed, and plan this one. order: the batch's requests."""
        tables = self.planner.tables
        for request_id in finished:
            tables.release(request_id)
        before = self.planner.before(tables.apply(delta))
        if not before.is_nothing:
            for arena in arenas:
                self._attention.prepare(arena, before)
        requests = [(i, delta.requests[i].computed, new[i]) for i in order]
        self._plan = self.planner.plan(requests) if requests else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FrameMetadata:
        plan, self._plan = self._plan, None
        if plan is None and common_attn_metadata.max_query_len == 1:
            plan = self.planner.idle(common_attn_metadata.num_reqs)
        return FrameMetadata(plan, self.spec)


class FrameImpl(AttentionImpl[FrameMetadata]):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: Any = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, **extra: Any,
    ) -> None:  # fmt: skip
        for what, given in (
            ("ALiBi", alibi_slopes), ("sliding-window layers", sliding_window), ("a soft cap of logits", logits_soft_cap),
            ("layers that share another's cache", kv_sharing_target_layer_name), ("learned sinks", extra.get("sinks")),
            (f"attention of type {attn_type}", attn_type != AttentionType.DECODER),
        ):  # fmt: skip
            if given is not None and given is not False:
                raise UnsupportedEngineError(f"kvstrata: {what} cannot be served; accepted: decoders of plain full attention")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: FrameMetadata | None,
        output: Tensor | None = None, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert output is not None
        if attn_metadata is None or attn_metadata.plan is None:
            return output.zero_()
        q = query.view(-1, self.num_heads, self.head_size)
        k, v = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        attention = LayerAttention(self.head_size, attn_metadata.spec.dense_dtype, self.scale)
        attention.forward(kv_cache, attn_metadata.plan, q, k, v, output.view(-1, self.num_heads, self.head_size))
        return output
