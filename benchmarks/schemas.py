"""Rows of runs that were recorded in schema 1, where every operation had rows of its own, as `record.Row`."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.record import Figures, Row


def row_1(content: dict[str, Any], row: dict[str, Any]) -> Row:
    """A row of schema 1; null has become NaN in it."""
    return {"calls": _calls, "compile": _compile, "grouped": _grouped, "moe": _moe}.get(content.get("op", ""), _gemm)(
        row, content["roofline"]
    )


def _known(ratios: dict[str, float]) -> dict[str, float]:
    return {key: ratio for key, ratio in ratios.items() if not math.isnan(ratio)}


def _same(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in ("case", "failure", *names)}


def _gemm(row: dict[str, Any], roofline: Any) -> Row:
    """Dense products, fused or not."""
    xla = Figures(row["xla_us"], row["xla_iqr_us"], row["xla_kernel"], row.get("xla_peak_mib", math.nan))
    plain = Figures(row.get("plain_us", math.nan))
    return Row(
        **_same(row, "kernel", "us", "iqr_us", "tflops", "roofline", "error"),
        variant=row["choice"],
        peak_mib=row.get("peak_mib", math.nan),
        ratios=_known({"xla": row["ratio"], "plain": 1 / row.get("plain_ratio", math.nan)}),
        targets=_known({"xla": row["target"], "plain": 1 / row.get("plain_target", math.nan)}),
        peers={"xla": xla} | ({} if math.isnan(plain.us) else {"plain": plain}),
    )


def _grouped(row: dict[str, Any], roofline: Any) -> Row:
    share = max(row["tflops"] / roofline["tflops"], row["gb_per_s"] / roofline["gb_per_s"])
    return Row(
        **_same(row, "product", "kernel", "us", "iqr_us", "tflops", "gb_per_s", "error", "targets"),
        roofline=share,
        ratios=_known(row["ratios"]),
        peers={name: Figures(**peer) for name, peer in row["peers"].items()},
    )


def _moe(row: dict[str, Any], roofline: Any) -> Row:
    return Row(
        **_same(row, "us", "iqr_us", "tflops", "peak_mib", "error"),
        ratios=_known({"xla": row["ratio"]}),
        targets=_known({"xla": row["target"]}),
        peers={"xla": Figures(row["xla_us"], peak_mib=row["xla_peak_mib"])},
        figures={name: row[name] for name in ("tokens", "rest_us", "parts", "device_mib", "xla_tokens", "same_us")},
    )


def _compile(row: dict[str, Any], roofline: Any) -> Row:
    figures = {key: value for key, value in row.items() if key not in ("case", "target", "failure")}
    return Row(
        **_same(row),
        ratios=_known({"limit": row["target"] / row["cpu_s"]}),
        targets={"limit": 1.0},
        figures=figures | {"most_s": row["target"]},
    )


def _calls(row: dict[str, Any], roofline: Any) -> Row:
    forms = {form: Figures(row[f"{form}_us"], row[f"{form}_iqr_us"]) for form in ("inlined", "called")}
    ships = forms.pop(row["ships"])
    (other,) = forms.values()
    return Row(
        **_same(row),
        us=ships.us,
        iqr_us=ships.iqr_us,
        ratios=_known({"other": 1 / row["ratio"]}),
        targets={"other": 1 / row["most_ratio"]},
        peers={"other": other, "plain": Figures(row["plain_us"])},
        figures={"ships": row["ships"], "different": row["different"]},
    )
