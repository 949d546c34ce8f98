"""load-test --check: compare the outputs of every answer with those of the first answer to the same request."""
from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from infer_server.clients.channels import StatusError
from infer_server.clients.codec import Array, infer_outputs
from infer_server.clients.errors import ResponseError
from infer_server.clients.load.transports.transport import Send
from infer_server.protos import inference as pb

TOLERANCE = 1e-3            # relative to the output's largest magnitude: rounding may depend on the batch size


def checked(send: Send) -> Send:
    """Wrap a request to fail with DATA_LOSS if its outputs differ from those of its first answer."""
    first: dict[str, Array] = {}

    async def send_and_check(timeout: float) -> None:
        response = await send(timeout) or b""
        try:
            outputs = infer_outputs(pb.ModelInferResponse.FromString(response))
        except (DecodeError, ResponseError) as error:
            raise StatusError("DATA_LOSS", f"the answer cannot be read: {error}") from error
        if not first:
            first.update(outputs)
        if outputs.keys() != first.keys():
            raise StatusError("DATA_LOSS", f"the answer has outputs {sorted(outputs)}, the first {sorted(first)}")
        for name, output in outputs.items():
            if reason := difference(first[name], output):
                raise StatusError("DATA_LOSS", f"output '{name}' differs from that of the first answer: {reason}")

    return send_and_check


def difference(expected: Array, output: Array) -> str:
    """Return the difference of an output from the expected one, or ""."""
    if (expected.dtype, expected.shape) != (output.dtype, output.shape):
        return f"{output.dtype}{list(output.shape)} in the place of {expected.dtype}{list(expected.shape)}"
    if output.dtype.kind != "f":
        count = np.count_nonzero(output != expected)
        return f"{count} of {output.size} elements" if count else ""
    magnitude = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    close = np.isclose(output, expected, rtol=0.0, atol=TOLERANCE * magnitude, equal_nan=True)
    return "" if close.all() else f"{np.count_nonzero(~close)} of {output.size} elements"
