"""Python models (model.py with Triton's TritonPythonModel), with a process for each instance."""
from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np
from google.protobuf import json_format

from infer_server.batching.request import Arrays, InSequence, Outcome, Request, parameters_of
from infer_server.batching.statistics import BatchExecution
from infer_server.config.config import ModelConfig, complete_policy, from_message
from infer_server.config.groups import settle
from infer_server.config.paths import check_name
from infer_server.config.signature import Items, ModelSignature
from infer_server.errors import (
    CancelledError,
    ExecutionError,
    InvalidRequestError,
    ModelConfigError,
    NotServedError,
    RepositoryError,
    ServeError,
)
from infer_server.observing.custom_metrics import CustomMetrics, MetricsOwner
from infer_server.observing.traces import RequestTrace
from infer_server.protocol.parameters import Parameters
from infer_server.protocol.protobuf_json import to_json
from infer_server.protos import model_config
from infer_server.python_backend.channel import ChannelMessage, typed
from infer_server.python_backend.executor import PythonExecutor
from infer_server.python_backend.failures import error_head
from infer_server.python_backend.launch import LaunchParameters
from infer_server.python_backend.process import Answer, Handlers, ModelProcess
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.folders import Source
from infer_server.repository.kinds.local import Find, ModelControl, request_of
from infer_server.repository.kinds.warmup import warmup_requests
from infer_server.repository.model import Model, QueuedModel
from infer_server.workers import post

_START_SECS = 600.0
_EXECUTE_SECS = 300.0
_UNLOADING_SECS = 1.0        # time for which a model that unloads another waits for its end


class PythonModel(QueuedModel):
    """Python model whose processes are initialised when it is constructed."""

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop, find: Find,
                 limiter: RateLimiter | None, metrics: CustomMetrics, owner: MetricsOwner,
                 control: Callable[[], ModelControl]) -> None:
        """Start the processes and initialise them; `owner` owns the custom metrics that they define."""
        self._find, self._metrics, self._owner, self._control = find, metrics, owner, control
        self._unloading: set[asyncio.Future[None]] = set()
        self._unanswered: dict[Request, None] = {}      # requests without their last response, not cancelled
        process, message, config = self._first(source, loop)
        signature = ModelSignature(config, Items(config.batched, config.batching.max_batch_size))
        super().__init__(source.name, source.version, message, config, signature, loop)
        self._executors: list[PythonExecutor] = []
        for index in range(config.instances):
            start = partial(self._start, _launch(source, message, config, index), loop, True)
            try:
                self._executors.append(PythonExecutor(process if index == 0 else start(), start, partial(post, loop)))
                began = time.monotonic()
                self._warm_up(self._executors[-1], source)
                self.warmup_secs += time.monotonic() - began
            except Exception:
                self._close()
                raise
        try:
            self.start(self._executors, limiter)
        except ModelConfigError:
            self._close()
            raise

    def _close(self) -> None:
        for executor in self._executors:
            executor.close()

    @property
    def is_busy(self) -> bool:
        return bool(self._unanswered)

    def _enqueue(self, request: Request) -> None:
        super()._enqueue(request)
        self._unanswered[request] = None

    def drain(self) -> None:
        super().drain()
        self._metrics.release(self._owner)

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self._unanswered.pop(request, None)
        for executor in self._executors:
            executor.cancel(request)

    async def is_ready(self) -> bool:
        return all(await asyncio.gather(*(executor.is_ready() for executor in self._executors)))

    def _after(self, request: Request) -> None:
        super()._after(request)
        self._unanswered.pop(request, None)
        if self.config.sequences:
            for executor in self._executors:
                executor.forget(request)

    def _deliver_late(self, outcomes: list[Outcome], execution: BatchExecution | None) -> None:
        """Deliver responses of response senders, except those to warm-up requests, which were never queued."""
        self.deliver([outcome for outcome in outcomes if outcome[0].enqueued_ns], execution)

    def _warm_up(self, executor: PythonExecutor, source: Source) -> None:
        """Execute the model_warmup requests. Raises RepositoryError if the model fails one of them."""
        for request in warmup_requests(self, self.config_message, source.folder):
            try:
                outcomes, _ = executor.execute([request])
            except ExecutionError as error:
                raise RepositoryError(f"model_warmup: {error}") from error
            executor.forget(request)
            for _, result in outcomes:
                if isinstance(result, ServeError):
                    raise RepositoryError(f"model_warmup: {result}")

    def _first(self, source: Source, loop: asyncio.AbstractEventLoop
               ) -> tuple[ModelProcess, model_config.ModelConfig, ModelConfig]:
        """Start the first process and return it with the configuration that its auto_complete_config completes."""
        message = complete(source.message, source.name)
        process = self._start(_launch(source, message, from_message(message, is_complete=False), 0), loop, False)
        try:
            completed = process.initialize(complete=True)
            message = complete(json_format.Parse(completed, model_config.ModelConfig()), source.name)
            config = from_message(message, source.folder)
            if not config.outputs:
                raise ModelConfigError("output: a Python model needs one; give it in config.pbtxt, or in its "
                                       "auto_complete_config")
            process.launch = _launch(source, message, config, 0)
        except json_format.ParseError as error:
            process.kill()
            raise ModelConfigError(f"auto_complete_config: {error}") from error
        except ServeError:
            process.kill()
            raise
        return process, message, config

    def _start(self, launch: LaunchParameters, loop: asyncio.AbstractEventLoop, initialize: bool) -> ModelProcess:
        change = partial(self._change, loop, launch.arguments["model_name"])
        open_ = dict[int, _BlsRequest]()
        handlers: Handlers = {
            "infer": partial(_BlsRequest, self._find, lambda number: process.trace_of(number), loop, open_),
            "metric": self._handle_metric, "withdraw": partial(_withdraw, open_, loop),
            "ready": partial(_answer_ready, self._find, loop), "load": change, "unload": change}
        process: ModelProcess = ModelProcess(launch, handlers, self._deliver_late, partial(post, loop),
                                             partial(post, loop, _withdraw_all, open_))
        if initialize:
            try:
                process.initialize(complete=False)
            except ServeError:
                process.kill()
                raise
        return process

    def _handle_metric(self, message: ChannelMessage, answer: Answer) -> None:
        """Create, change or read a custom metric on behalf of a model."""
        head, metrics = message.head, self._metrics
        name, labels, operation = head["family"], head["labels"], head["operation"]
        if operation == "make":
            metrics.make(self._owner, name, head["of"], head["text"], labels, head["buckets"])
        elif operation != "value":
            metrics.change(name, labels, operation, head["value"])
            return
        answer({"final": True, "value": metrics.value(name, labels)}, {})

    def _change(self, loop: asyncio.AbstractEventLoop, caller: str, message: ChannelMessage, answer: Answer) -> None:
        """Load or unload a model on behalf of the Python model `caller`."""
        head, name = message.head, message.head["model"]
        if name == caller:
            raise InvalidRequestError(f"model '{name}' cannot {head['kind']} itself: that waits until it has executed")
        if head["kind"] == "unload":
            change = self._unload(name, {"unload_dependents": head["unload_dependents"]})
        else:
            override = {"config": head["config"]} if head["config"] != "" else {}
            files = {path: content.tobytes() for path, content in message.tensors[0].items()}
            change = self._load(caller, name, {**override, **files})

        async def changed() -> None:
            try:
                await change
            except Exception as error:
                answer(error_head(error), {})
            else:
                answer({"final": True, "value": None}, {})

        asyncio.run_coroutine_threadsafe(changed(), loop)

    async def _unload(self, name: str, parameters: Parameters) -> None:
        """Begin to unload a model and wait for a short time only, as Triton does: it may be serving the caller."""
        unloading = asyncio.ensure_future(self._control().unload(name, parameters))
        self._unloading.add(unloading)
        unloading.add_done_callback(self._unloading.discard)
        done, _ = await asyncio.wait({unloading}, timeout=_UNLOADING_SECS)
        for one in done:
            one.result()

    async def _load(self, caller: str, name: str, parameters: Parameters) -> None:
        """Load a model. Raises RepositoryError if its load waits for the load of `caller`."""
        control = self._control()
        with control.waiting(caller, name):
            await control.load(name, parameters, at_once=True)


def _answer_ready(find: Find, loop: asyncio.AbstractEventLoop, message: ChannelMessage, answer: Answer) -> None:
    async def look() -> None:
        try:
            ready = await find(message.head["model"], message.head["version"]).is_ready()
        except ServeError:
            answer({"final": True, "value": False}, {})
        except Exception as error:      # the model may pass a name or version of any type
            answer(error_head(error), {})
        else:
            answer({"final": True, "value": ready}, {})

    asyncio.run_coroutine_threadsafe(look(), loop)


def _withdraw(open_: Mapping[int, _BlsRequest], loop: asyncio.AbstractEventLoop, message: ChannelMessage,
              _: Answer) -> None:
    """Cancel a request that a Python model has sent to another model, unless it has ended."""
    def withdraw() -> None:
        if request := open_.get(message.head["call"]):
            request.withdraw()

    post(loop, withdraw)


def _withdraw_all(open_: Mapping[int, _BlsRequest]) -> None:
    """Cancel the open requests of a process that has ended."""
    for request in list(open_.values()):
        request.withdraw()


def complete(message: model_config.ModelConfig, name: str) -> model_config.ModelConfig:
    """Return a copy of the configuration completed as far as possible without the model. Raises ModelConfigError."""
    completed = model_config.ModelConfig()
    completed.CopyFrom(message)
    check_name(completed.name, name)
    completed.name, completed.backend = name, "python"
    completed.max_batch_size = completed.max_batch_size     # makes the field present even if it is 0
    completed.default_model_filename = completed.default_model_filename or "model.py"
    if not completed.instance_group:
        completed.instance_group.add(name=f"{name}_0")
    settle(completed)
    complete_policy(completed)
    return completed


def _instance_name(message: model_config.ModelConfig, index: int) -> str:
    """Return the name of an instance in Triton's form: group name and index."""
    for number, group in enumerate(message.instance_group):
        if index < group.count:
            return f"{group.name or f'{message.name}_{number}'}_{index}"
        index -= group.count
    raise AssertionError("there are as many instances as the groups have")


def _launch(source: Source, message: model_config.ModelConfig, config: ModelConfig, index: int) -> LaunchParameters:
    name = _instance_name(message, index)
    seconds = {}
    for key, default in (("start_timeout_secs", _START_SECS), ("execute_timeout_secs", _EXECUTE_SECS)):
        try:
            seconds[key] = float(config.parameters.get(key, default))
        except ValueError:
            raise ModelConfigError(f"parameter {key}: expected a number of seconds") from None
        if not 0 < seconds[key] <= TIMEOUT_MAX:         # also rejects NaN
            raise ModelConfigError(f"parameter {key}: expected a number of seconds up to {TIMEOUT_MAX:g}")
    arguments = {
        "model_config": json.dumps(to_json(message)),
        "model_instance_kind": "CPU", "model_instance_name": name, "model_instance_device_id": "0",
        "model_repository": str(source.folder), "model_version": str(source.version), "model_name": source.name}
    added = config.sequences.datatypes if config.sequences else {}
    return LaunchParameters(
        name, source.file, arguments,
        inputs={**{spec.name: spec.datatype for spec in config.inputs}, **added},
        outputs={**{spec.name: spec.datatype for spec in config.outputs}, **added},
        is_decoupled=config.decoupled, is_iterative=config.sequences is not None and config.sequences.policy.iterative,
        start_secs=seconds["start_timeout_secs"], execute_secs=seconds["execute_timeout_secs"])


class _BlsRequest:
    """Request that a Python model sends to another model (BLS), and the Reply that receives its responses."""

    def __init__(self, find: Find, trace_of: Callable[[int], RequestTrace | None], loop: asyncio.AbstractEventLoop,
                 open_: dict[int, _BlsRequest], message: ChannelMessage, answer: Answer) -> None:
        """Submit the request on the event loop.

        Parameters
        ----------
        find : callable
            Returns a ready model by name and version.
        trace_of : callable
            Returns the trace of a request that the calling model is executing, by its number.
        loop : asyncio.AbstractEventLoop
            Event loop of the models.
        open_ : dict of int to _BlsRequest
            Open requests of the process by number; this one adds and removes itself, on the loop.
        message : Message
            Request as the process sent it.
        answer : callable
            Sends a response to the process.
        """
        self._find, self._trace_of, self._open, self._message, self._answer = find, trace_of, open_, message, answer
        self._decoupled = self._sent_final = self.gone = False
        self._submitted: tuple[Model, Request] | None = None
        post(loop, self._submit)

    def send(self, response: Any) -> None:
        """End the request; its tensors were sent when they were encoded."""
        self._end()

    def part(self, response: Any, is_last: bool = False) -> None:
        """Note the final flag; the tensors were sent when they were encoded."""
        self._sent_final = is_last

    def end(self) -> None:
        """End the request; unless a response was final, send an empty final response, as Triton does."""
        self._end()
        self._answer({"final": True} if self._sent_final else {"final": True, "parameters": {}}, {})

    def fail(self, error: Exception) -> None:
        self._end()
        self._answer(error_head(error), {})

    def withdraw(self) -> None:
        submitted = self._submitted
        self.fail(CancelledError("the request was cancelled by the model that made it"))
        if submitted:
            model, request = submitted
            model.cancel(request)

    def _end(self) -> None:
        self.gone = True
        self._open.pop(self._message.head["number"], None)
        submitted, self._submitted = self._submitted, None      # breaks the reference cycle with the request
        if submitted and (trace := submitted[1].trace):
            trace.ended()

    def _submit(self) -> None:
        head = self._message.head
        failed = f"Model {head['model']} - Error when running inference: "
        self._open[head["number"]] = self
        try:
            model = self._find(head["model"], str(head["version"]) if head["version"] > 0 else "")
            self._decoupled = model.is_decoupled
            if self._decoupled and not head["decoupled"]:
                raise NotServedError("The current BLS request call doesn't support models using the decoupled "
                                     "transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                                     "'async_exec' calls for decoupled models.")
            self._outputs = head["outputs"] or [spec.name for spec in model.config.outputs]
            sequence = head["sequence"]
            request = request_of(
                model, self._message.tensors[0], head["outputs"], self._encode, self, timeout_us=head["timeout"],
                priority=head["priority"], request_id=head["id"], parameters=head["parameters"],
                sequence=InSequence(sequence, bool(head["flags"] & 1), bool(head["flags"] & 2)) if sequence else None)
            if trace := self._trace_of(head["traced_by"]):
                request.follow(trace.step(), model.name, model.version)
            self._submitted = model, request
            model.submit(request)
        except ServeError as error:
            self.fail(type(error)(f"{failed}{error}"))
        except (KeyError, TypeError, ValueError) as error:
            self.fail(InvalidRequestError(f"{failed}{type(error).__name__}: {error}"))

    def _encode(self, computed: Arrays) -> None:
        """Send the outputs, on the thread that computed them, while they are valid."""
        if self.gone:
            return
        self._answer({"final": not self._decoupled, "parameters": dict(parameters_of(computed))}, {
            name: typed(np.asarray(computed[name])) for name in self._outputs if name in computed})
