"""Text about the quantised weights of a plan: metadata["weights"], which a weight-only build writes."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_LEFT = ("stays", "stay")
_NOUNS = {False: ("matrix", "matrices"), True: ("table", "tables")}


def weights_text(metadata: Mapping[str, Any]) -> str:
    """Return lines with the layers, bits, bytes and errors of quantised weights; "" for a plan without them."""
    report = metadata.get("weights")
    if not report:
        return ""
    layers = report["layers"]
    kinds = Counter((layer["bits"], layer["table"], layer["rounding"]) for layer in layers)
    lines = [f"  {count} {_NOUNS[table][count > 1]} of INT{bits}, {_scales(bits, table, report)}, rounded "
             + ("to the nearest" if rounding == "nearest" else f"by {rounding}")
             for (bits, table, rounding), count in kinds.items()]
    known = [layer for layer in layers if layer["sqnr_db"] is not None]
    if known:
        least, most = (choose(known, key=lambda layer: layer["sqnr_db"]) for choose in (min, max))
        lines.append(f"  SQNR of the weights {least['sqnr_db']:.1f} to {most['sqnr_db']:.1f} dB, least in "
                     f"'{least['node']}'" + _outputs(layers))
    if kept := report["float_layers"]:
        (reason, count), *_ = Counter(text.partition(" (")[0] for text in kept.values()).most_common(1)
        lines.append(f"  {len(kept)} {_LEFT[len(kept) > 1]} float, {count} of them: {reason}")
    head = (f"weights: {report['quantised'] / 1e6:.2f} of {report['float_weights'] / 1e6:.2f} M are quantised, "
            f"{report['bits']:.2f} bits each; the model's constants take {report['bytes'] / 1e6:.1f} MB, "
            f"{report['float_bytes'] / 1e6:.1f} MB before")
    return "\n".join([head, *lines])


def _scales(bits: int, table: bool, report: Mapping[str, Any]) -> str:
    if bits == 4:
        return f"a scale for {report['group_size']} weights" + ", rows rounded to INT8" * bool(report["accuracy_level"])
    return f"a scale for each {'row' if table else 'output channel'}"


def _outputs(layers: list[Mapping[str, Any]]) -> str:
    """Return the range of the SQNR of layers' outputs, where calibration data tell it."""
    known = [layer["output_sqnr_db"] for layer in layers if layer["output_sqnr_db"] is not None]
    if not known:
        return ""
    return f"; of the layers' outputs {min(known):.1f} to {max(known):.1f} dB"
