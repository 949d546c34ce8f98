"""ModelInfer without coroutines: a request is submitted with an object that receives its response or error."""
from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from infer_server.batching.request import Request
from infer_server.batching.statistics import Failure
from infer_server.endpoints.grpc.infer_reply import InferReply
from infer_server.endpoints.grpc.service.infer import GrpcCall, GrpcEncoder
from infer_server.endpoints.restrictions import CATEGORY_BY_CALL, Restrictions
from infer_server.endpoints.services import InferenceServices
from infer_server.errors import MemoryLimitError
from infer_server.protocol.wire import MessageLayout, layout_of, split_request
from infer_server.repository.model import Model
from infer_server.serving import Prepared, Submitted

_CATEGORY = CATEGORY_BY_CALL["ModelInfer"]
_MAX_FORMS = 256                    # number of request layouts cached for each model


class _CachedLayout(NamedTuple):
    """Cached layout of requests to a model, with everything that depends on it."""
    prepared: Prepared
    inputs: Sequence[tuple[str, tuple[int, ...], np.dtype[Any], int]]      # name, shape, dtype and position of each
    encode: GrpcEncoder


class InferCalls:
    """Handler of ModelInfer calls. Belongs to the event loop."""

    def __init__(self, services: InferenceServices, restrictions: Restrictions) -> None:
        self.services, self._restrictions = services, restrictions
        self._is_restricted = _CATEGORY in restrictions.secrets
        self._repeats = not (services.on_demand or services.inferences.observes(GrpcCall.protocol))

    def take(self, reply: InferReply, data: bytes, received_ns: int, remaining_secs: float | None) -> None:
        """See TakesInfer."""
        try:
            if self._is_restricted:
                self._restrictions.check(_CATEGORY, dict(reply.metadata()).get)
            layout = layout_of(data) if self._repeats else None
            if layout:
                model = self.services.inferences.find(layout.form.model, layout.form.version)
                if repeated := model.repeated.get(layout.form):
                    self._take_again(model, repeated, reply, data, received_ns, remaining_secs)
                    return
            open_call = reply.open_call
            if open_call is None:
                open_call = reply.open_call = self.services.inflight.begin(reply, len(data))
            call = GrpcCall(split_request(data), received_ns, remaining_secs, self.services, open_call)
            if self.services.on_demand:
                self.services.on_demand.when_loaded(call.model, partial(self._submit, call, reply), reply.fail)
            else:
                self._submit(call, reply)
            if layout:
                self._remember(layout, reply)
        except Exception as error:
            reply.fail(error)

    def _submit(self, call: GrpcCall, reply: InferReply) -> None:
        if not reply.gone:
            reply.submitted = self.services.inferences.submit(call, reply)

    def _take_again(self, model: Model, repeated: _CachedLayout, reply: InferReply, data: bytes, received_ns: int,
                    remaining_secs: float | None) -> None:
        """Submit a request with a cached layout, as Inferences.submit does, without decoding its header."""
        prepared, inputs, encode = repeated
        try:
            if open_call := reply.open_call:
                self.services.inflight.expect(open_call, prepared.answer_bytes, 0)
            else:
                reply.open_call = self.services.inflight.begin(reply, len(data), prepared.answer_bytes)
        except MemoryLimitError:
            model.statistics.failed(Failure.OTHER, time.monotonic_ns() - received_ns)
            raise
        request = Request(
            {name: np.ndarray(shape, dtype, data, begin) for name, shape, dtype, begin in inputs}, prepared.fit.items,
            prepared.fit.shape_key, encode, reply, prepared.timeout_us, prepared.priority,
            parameters=prepared.parameters, outputs=prepared.outputs, received_ns=received_ns,
            deadline_ns=0 if remaining_secs is None else received_ns + int(remaining_secs * 1e9))
        model.submit(request)
        reply.submitted = Submitted(model, request)

    def _remember(self, layout: MessageLayout, reply: InferReply) -> None:
        """Cache the layout of a submitted request if its handling depends on nothing else."""
        form, submitted = layout.form, reply.submitted
        if not isinstance(submitted, Submitted):
            return
        model = submitted.model
        prepared: Prepared | None = model.prepared.get(form)
        if prepared and model.signature.is_identity and prepared.sequence is None and not (
                form.references or form.outputs_have_parameters or form.has_contents) and (
                len(layout.tensors) == len(prepared.tensors)) and all(each.is_plain for each in prepared.tensors):
            if len(model.repeated) >= _MAX_FORMS:
                model.repeated.clear()
            model.repeated[form] = _CachedLayout(prepared, [
                (each.name, each.shape, each.datatype.array, begin)
                for each, (begin, _) in zip(prepared.tensors, layout.tensors, strict=True)],
                GrpcEncoder(prepared.served))
