"""Speed by kind of case: ratios of recorded runs, in tables and a picture of README.md and docs/performance.md."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence

from benchmarks import final, report
from benchmarks.record import Row


@dataclasses.dataclass(frozen=True)
class Answer:
    """One line of a table: what was measured, beside what, and the rows of a recorded run that tell.

    Attributes:
      what: the case, as a reader would name it.
      beside: whose time is compared.
      stem: of the recorded run's file.
      chosen: the rows that belong to it.
      key: of their ratios.
      more: the page that says more, and a heading on it.
      brief: what README says instead; "" where it leaves the line out.
      label: its name in the picture; "" where it has none.
    """

    what: str
    beside: str
    stem: str
    chosen: Callable[[Row], bool]
    key: str = "xla"
    more: str = ""
    brief: str = ""
    label: str = ""

    def rows(self, folder: pathlib.Path) -> list[Row]:
        """Returns the rows of its run that belong to it and were timed; none of a run that is not recorded."""
        path = folder / f"{self.stem}.json"
        rows = _run(path)[1] if path.exists() else []
        return [row for row in rows if not row.failure and self.key in row.ratios and self.chosen(row)]

    @property
    def _choice(self) -> str:
        return "tuned" if self.key.endswith("tuned") else "untuned"

    def own(self, row: Row) -> bool:
        """True if a kernel ran in a row, and not XLA."""
        if "runs" in row.figures:  # of convolutions
            return row.figures["runs"] == "kernel"
        return row.figures.get(self._choice, {}).get("config") != "XLA"

    def commit(self, folder: pathlib.Path) -> str:
        """Returns the commit that was measured."""
        return _run(folder / f"{self.stem}.json")[0]["commit"][:7]

    def mean(self, folder: pathlib.Path) -> str:
        """Returns the geometric mean of the ratios."""
        return f"{report.geometric_mean(row.ratios[self.key] for row in self.rows(folder)):.2f}"

    def made_of(self, folder: pathlib.Path) -> str:
        """Returns the number of products, and their range, or the mean of those that kernels run."""
        rows = self.rows(folder)
        ratios = [row.ratios[self.key] for row in rows]
        if {self._choice, "runs"} & {*rows[0].figures}:  # of a run in which XLA is one of the choices
            own = [row.ratios[self.key] for row in rows if self.own(row)]
            left = f"{len(rows)}, of which {len(rows) - len(own)} are left to XLA"
            return f"{left}; {report.geometric_mean(own):.2f} over the {len(own)} its kernels run"
        return f"{len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "1"


@functools.lru_cache(maxsize=64)
def _run(path: pathlib.Path) -> tuple[dict, list[Row]]:
    return report.read(path)


def _any(row: Row) -> bool:
    return True


def _of(*words: str) -> Callable[[Row], bool]:
    """Returns a test for rows whose name has one of these words."""
    return lambda row: any(word in row.name for word in words)


def _kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.figures["kind"] == kind


def _ends(*words: str) -> Callable[[Row], bool]:
    return lambda row: row.name.endswith(words)


def _rows_up_to(most: int) -> Callable[[Row], bool]:
    return lambda row: int(row.case.partition("x")[0]) <= most


def _few(row: Row) -> bool:
    return row.figures["kind"] in ("fwd", "dx") and row.figures["tokens"] <= final.FEW


LEVEL = 0.995  # nearer to 1 than this, two runs disagree
XLA, JAX, TORCH = "XLA", "plain JAX", "torch's `grouped_mm`"
_H200, _FUSED, _GROUPED = "products-h200", "fused-59dab49-h200", "grouped-torch-h200"
_CONV = "conv-report-4-h200"
_EPILOGUES, _MODELS = "fused-epilogues.md", "#whole-models"
ANSWERS = (
    Answer(
        "products of models, nothing tuned", XLA, _H200, _any, brief="products of models", label="products of models"
    ),
    Answer("the same after `cutjax.autotune`", XLA, _H200, _any, "xla, tuned", label="products of models, tuned"),
    Answer("of them, 64 tokens or fewer", XLA, _H200, _few, label="64 tokens or fewer"),
    Answer("of them, weight gradients", XLA, _H200, lambda row: row.figures["kind"] == "dw"),
    Answer("of them, up to 10 us by XLA", XLA, _H200, lambda row: row.peers["xla"].us <= 10),
    Answer("of them, 10 to 100 us by XLA", XLA, _H200, lambda row: 10 < row.peers["xla"].us <= final.LONG_US),
    Answer("of them, over 100 us by XLA", XLA, _H200, lambda row: row.peers["xla"].us > final.LONG_US),
    Answer("products of models on an H100", XLA, "products-h100", _any),
    Answer("attention's batched products", XLA, "attention-h200", _any, label="attention's products"),
    Answer("rows of 1001 or 1030 elements", XLA, "dtypes-h200", _of("x1001x", "x4100x"), more="mma-kernels.md"),
    Answer(
        "with bias and GELU or SiLU in the kernel",
        XLA,
        _FUSED,
        _ends("bias+gelu", "bias+gelu(erf)", "bias+silu"),
        more=_EPILOGUES,
        brief="a product with bias and GELU or SiLU",
        label="with bias and GELU or SiLU",
    ),
    Answer(
        "with bias and ReLU, or with scale, bias and residual", XLA, _FUSED, _ends("relu", "residual"), more=_EPILOGUES
    ),
    Answer("a gate: `silu(x @ wg) * (x @ wu)`", XLA, _FUSED, _ends("(x@wu)"), more=_EPILOGUES),
    Answer("a layer of bias and GELU, forward and backward", XLA, _FUSED, _of("layer"), more=_EPILOGUES),
    Answer("`cutjax.mlp` with SwiGLU, forward and backward", XLA, "fused-h200", _of("SwiGLU"), more=_EPILOGUES),
    Answer(
        "rows in groups, forward and backward",
        TORCH,
        _GROUPED,
        _any,
        "torch",
        "grouped-kernels.md",
        "rows in groups",
        "rows in groups (torch)",
    ),
    Answer(
        "a layer of experts, forward and backward",
        "`jax.lax.ragged_dot`",
        "moe-h200",
        _of("bwd"),
        more="#layers-of-experts",
    ),
    Answer(
        "rows gathered by expert",
        "XLA's gather",
        "gather-h200",
        _ends(" rows"),
        more="moe.md#how-the-block-is-built",
    ),
    Answer(
        "convolutions of real networks, 139 of 169 in files that the models of times were fitted to",
        XLA,
        _CONV,
        _any,
        more="#convolutions",
        brief="convolutions, 139 of 169 fitted to",
        label="convolutions",
    ),
    Answer("of them, forward", XLA, _CONV, _kind("fwd"), more="#convolutions"),
    Answer("of them, gradients of images", XLA, _CONV, _kind("dx"), more="#convolutions"),
    Answer(
        "of them, gradients of weights",
        XLA,
        _CONV,
        _kind("dw"),
        more="#convolutions",
    ),
    Answer(
        "`cutjax.syrk`, from 1024 rows on; tuned to some of the sizes",
        "XLA's full product",
        "syrk-h200",
        _any,
    ),
    Answer(
        "8-bit weights by 1 to 16 rows",
        "XLA, converting",
        "quantized-h200",
        _rows_up_to(16),
        more="#weights-of-4-and-8-bits",
    ),
    Answer(
        "4-bit weights with scales of 128 of k, 1 to 256 rows, by kernels",
        "XLA, dequantizing",
        "low-precision-weights-h200",
        lambda row: "bfloat16 x int4" in row.name and "8g" not in row.name and _rows_up_to(256)(row),
        more="#weights-of-4-and-8-bits",
        brief="4-bit weights, 1 to 256 rows",
        label="4-bit weights, 1 to 256 rows",
    ),
    Answer(
        "4-bit weights of 8 experts, 16 to 256 tokens each, by kernels",
        "XLA, dequantizing",
        "low-precision-weights-h200",
        lambda row: "x int4" in row.name and "8g" in row.name,
        more="#weights-of-4-and-8-bits",
    ),
    Answer("complex64 by default", XLA, "dtypes-h200", _ends(" complex64"), more="mma-kernels.md#what-was-measured"),
    Answer(
        "float32 and float64 in 8 groups of rows",
        "`jax.lax.ragged_dot`",
        "dtypes-h200",
        _ends("8g"),
        more="mma-kernels.md#what-was-measured",
    ),
    Answer(
        "training steps of GPT-2 medium, ViT-B/16 and a Llama block under `cutjax.fuse`",
        JAX,
        "programs-h200",
        lambda row: row.product == "fuse" and "deepseek" not in row.case,
        "jax",
        _MODELS,
        "training steps under `fuse`: GPT-2, ViT, Llama",
    ),
    Answer(
        "training step of a DeepSeek-like layer of experts under `cutjax.fuse`",
        "plain JAX, one-hot",
        "programs-h200",
        lambda row: row.product == "fuse" and "deepseek" in row.case,
        "jax",
        _MODELS,
        "the same of experts like DeepSeek's",
    ),
    Answer("decoding under `fuse`", JAX, "programs-decoding-h200", _ends("fuse"), "jax", _MODELS),
    Answer(
        "layers of Llama 70B over 2 GPUs, transfers beside products",
        JAX,
        "collective-h200x2",
        _ends(" auto"),
        "jit",
        "#layers-over-devices",
    ),
    Answer(
        "training steps over 2 GPUs under `jax.jit`, sums in 16 bits",
        JAX,
        "sharded-h200x2",
        _ends("dtype"),
        "jax",
        "sharding.md#the-dtype-of-partial-sums",
    ),
)


# Where something else is faster: README names the worst of those that are brief.
LOSES = (
    Answer("products of models, nothing tuned", XLA, _H200, _any, brief="a product of models"),
    Answer("the same after `cutjax.autotune`", XLA, _H200, _any, "xla, tuned"),
    Answer("another sample, nothing tuned", XLA, "products-report32-h200", _any),
    Answer("products of models on an H100, nothing tuned", XLA, "products-h100", _any),
    Answer("attention's products, nothing tuned", XLA, "attention-h200", _any, brief="one of attention"),
    Answer("bias and ReLU in the kernel", XLA, _FUSED, _ends("relu"), more=_EPILOGUES),
    Answer("rows in groups", TORCH, _GROUPED, _any, "torch", "grouped-kernels.md"),
    Answer(
        "convolutions of real networks, 139 of 169 in files that the models of times were fitted to",
        XLA,
        _CONV,
        _any,
        more="#convolutions",
        brief="a convolution",
    ),
    Answer(
        'float32 "highest", float64, complex128, by kernels ("auto" leaves them to XLA)',
        XLA,
        "dtypes-h200",
        _ends("float32 highest", "float64", "complex64 highest", "complex128"),
        more="mma-kernels.md#what-was-measured",
    ),
    Answer(
        '8-bit weights by 64 rows and more, by kernels ("auto" leaves most to XLA)',
        "XLA, converting",
        "quantized-h200",
        lambda row: not _rows_up_to(16)(row),
        more="#weights-of-4-and-8-bits",
    ),
    Answer(
        '4-bit weights by 4096 rows, by kernels ("auto" leaves them to XLA)',
        "XLA, dequantizing",
        "low-precision-weights-h200",
        _of("4096x14336x4096"),
        more="#weights-of-4-and-8-bits",
    ),
    Answer(
        'training steps over 2 GPUs under `jax.jit`, with `use_partial_sums("float32")`',
        JAX,
        "sharded-h200x2",
        _ends(" cutjax"),
        "jax",
        "sharding.md#the-dtype-of-partial-sums",
        brief="training over 2 GPUs, sums in float32 by request",
    ),
    Answer(
        "`gemm_reduce_scatter` over 2 GPUs, sums in float32",
        JAX,
        "collective-h200x2",
        _ends(" auto"),
        "jit",
        "#layers-over-devices",
    ),
    Answer("decoding with the drop-ins", JAX, "programs-decoding-h200", _ends("dropin"), "jax", _MODELS),
)


def told(lines: Sequence[Answer], folder: pathlib.Path) -> list[Answer]:
    """Returns the lines of a table whose runs are recorded."""
    return [answer for answer in lines if answer.rows(folder)]


def gains(folder: pathlib.Path) -> Iterator[str]:
    """Yields the table of all answers."""
    yield "| what | beside | ratio | products | measured |"
    yield "|---|---|--:|---|---|"
    for x in told(ANSWERS, folder):
        yield f"| {_linked(x)} | {x.beside} | {x.mean(folder)} | {x.made_of(folder)} | `{x.stem}` {x.commit(folder)} |"


def losses(folder: pathlib.Path) -> Iterator[str]:
    """Yields the table of where something else is faster: the worst ratio, and how many are slower."""
    yield "| what | beside | worst | slower | measured |"
    yield "|---|---|--:|---|---|"
    for x in told(LOSES, folder):
        ratios = [row.ratios[x.key] for row in x.rows(folder)]
        slower = f"{sum(ratio < LEVEL for ratio in ratios)} of {len(ratios)}"
        yield f"| {_linked(x)} | {x.beside} | {min(ratios):.2f} | {slower} | `{x.stem}` {x.commit(folder)} |"


def brief(folder: pathlib.Path) -> Iterator[str]:
    """Yields README's table; its last row says where something else is faster."""
    yield "| what | beside | ratio | measured |"
    yield "|---|---|---|---|"
    for x in told(ANSWERS, folder):
        if x.brief:
            ratio = f"{x.mean(folder)} over {x.made_of(folder)}" if len(x.rows(folder)) > 1 else x.mean(folder)
            yield f"| {x.brief} | {x.beside} | {ratio} | `{x.stem}`, {x.commit(folder)} |"
    worst = [(x.brief, min(row.ratios[x.key] for row in x.rows(folder))) for x in told(LOSES, folder) if x.brief]
    yield f"| **where it loses**, at worst | | {'; '.join(f'{ratio:.2f}: {what}' for what, ratio in worst)} | |"


def _linked(answer: Answer) -> str:
    return f"[{answer.what}]({answer.more})" if answer.more else answer.what
