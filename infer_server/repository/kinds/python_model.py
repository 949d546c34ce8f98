"""A Python model: model.py with Triton's TritonPythonModel, each instance in a process of its own."""
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
from infer_server.config.signature import Items, Signature
from infer_server.errors import (
    CancelledError,
    ExecutionError,
    InvalidRequestError,
    ModelConfigError,
    NotServedError,
    RepositoryError,
    ServeError,
)
from infer_server.observing.custom_metrics import CustomMetrics, Owner
from infer_server.observing.traces import Trace
from infer_server.protocol.parameters import Parameters
from infer_server.protocol.protobuf_json import to_json
from infer_server.python_backend.channel import Message, typed
from infer_server.python_backend.executor import PythonExecutor
from infer_server.python_backend.failures import refusal
from infer_server.python_backend.launch import Launch
from infer_server.python_backend.process import Answer, Asked, ModelProcess
from infer_server.rate_limiter import RateLimiter
from infer_server.repository.folders import Source
from infer_server.repository.kinds.local import Control, Find, request_of
from infer_server.repository.kinds.warmup import warmup_requests
from infer_server.repository.model import Model, QueuedModel
from infer_server.workers import post
from protos import model_config

_START_SECS = 600.0
_EXECUTE_SECS = 300.0
_UNLOADING_SECS = 1.0        # that a model which unloads another waits for its end


class PythonModel(QueuedModel):
    """Its processes are initialised when it is constructed."""

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop, find: Find,
                 limiter: RateLimiter | None, metrics: CustomMetrics, owner: Owner,
                 control: Callable[[], Control]) -> None:
        """owner: of its metrics."""
        self._find, self._metrics, self._owner, self._control = find, metrics, owner, control
        self._unloading: set[asyncio.Future[None]] = set()
        self._unanswered: dict[Request, None] = {}      # until their last response, or their clients have left
        process, message, config = self._first(source, loop)
        signature = Signature(config, Items(config.batched, config.batching.max_batch_size))
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
        """What senders give. That of a warm-up, which was in no queue, is counted nowhere."""
        self.deliver([outcome for outcome in outcomes if outcome[0].enqueued_ns], execution)

    def _warm_up(self, executor: PythonExecutor, source: Source) -> None:
        """Raises RepositoryError: the model refuses one of its model_warmup."""
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
        """The first process, and the configuration that its auto_complete_config completes, also as it is read."""
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

    def _start(self, launch: Launch, loop: asyncio.AbstractEventLoop, initialize: bool) -> ModelProcess:
        change = partial(self._change, loop, launch.arguments["model_name"])
        open_ = dict[int, _Asked]()
        asked: Asked = {"infer": partial(_Asked, self._find, lambda number: process.trace_of(number), loop, open_),
                        "metric": self._of_metric,
                        "withdraw": partial(_withdraw, open_, loop),
                        "ready": partial(_answer_ready, self._find, loop), "load": change, "unload": change}
        process: ModelProcess = ModelProcess(launch, asked, self._deliver_late, partial(post, loop),
                                             partial(post, loop, _withdraw_all, open_))
        if initialize:
            try:
                process.initialize(complete=False)
            except ServeError:
                process.kill()
                raise
        return process

    def _of_metric(self, message: Message, answer: Answer) -> None:
        """What a model does with a metric of its own."""
        head, metrics = message.head, self._metrics
        name, labels, what = head["family"], head["labels"], head["what"]
        if what == "make":
            metrics.make(self._owner, name, head["of"], head["text"], labels, head["buckets"])
        elif what != "value":
            metrics.change(name, labels, what, head["value"])
            return
        answer({"final": True, "value": metrics.value(name, labels)}, {})

    def _change(self, loop: asyncio.AbstractEventLoop, asking: str, message: Message, answer: Answer) -> None:
        """Loads or unloads a model that this one, `asking`, asks for."""
        head, name = message.head, message.head["model"]
        if name == asking:
            raise InvalidRequestError(f"model '{name}' cannot {head['kind']} itself: that waits until it has executed")
        if head["kind"] == "unload":
            change = self._unload(name, {"unload_dependents": head["unload_dependents"]})
        else:
            given = {"config": head["config"]} if head["config"] != "" else {}
            files = {path: content.tobytes() for path, content in message.tensors[0].items()}
            change = self._load(asking, name, {**given, **files})

        async def changed() -> None:
            try:
                await change
            except Exception as error:
                answer(refusal(error), {})
            else:
                answer({"final": True, "value": None}, {})

        asyncio.run_coroutine_threadsafe(changed(), loop)

    async def _unload(self, name: str, parameters: Parameters) -> None:
        """As in Triton it need not have come to its end: what the model still answers may wait for who asks."""
        unloading = asyncio.ensure_future(self._control().unload(name, parameters))
        self._unloading.add(unloading)
        unloading.add_done_callback(self._unloading.discard)
        done, _ = await asyncio.wait({unloading}, timeout=_UNLOADING_SECS)
        for one in done:
            one.result()

    async def _load(self, asking: str, name: str, parameters: Parameters) -> None:
        """Raises RepositoryError: the model waits for `asking` to be loaded itself."""
        control = self._control()
        with control.waiting(asking, name):
            await control.load(name, parameters, at_once=True)


def _answer_ready(find: Find, loop: asyncio.AbstractEventLoop, message: Message, answer: Answer) -> None:
    async def look() -> None:
        try:
            ready = await find(message.head["model"], message.head["version"]).is_ready()
        except ServeError:
            answer({"final": True, "value": False}, {})
        except Exception as error:      # a name or version may be of any type
            answer(refusal(error), {})
        else:
            answer({"final": True, "value": ready}, {})

    asyncio.run_coroutine_threadsafe(look(), loop)


def _withdraw(open_: Mapping[int, _Asked], loop: asyncio.AbstractEventLoop, message: Message, _: Answer) -> None:
    """Ends a request that a Python model has made of another, unless it has ended."""
    def withdraw() -> None:
        if asked := open_.get(message.head["asked"]):
            asked.withdraw()

    post(loop, withdraw)


def _withdraw_all(open_: Mapping[int, _Asked]) -> None:
    """Ends what a process has asked for that has ended itself: nobody reads an answer, or would ever cancel."""
    for asked in list(open_.values()):
        asked.withdraw()


def complete(message: model_config.ModelConfig, name: str) -> model_config.ModelConfig:
    """A copy with all that is known without the model. Raises ModelConfigError."""
    completed = model_config.ModelConfig()
    completed.CopyFrom(message)
    check_name(completed.name, name)
    completed.name, completed.backend = name, "python"
    completed.max_batch_size = completed.max_batch_size     # 0 is said, too
    completed.default_model_filename = completed.default_model_filename or "model.py"
    if not completed.instance_group:
        completed.instance_group.add(name=f"{name}_0")
    settle(completed)
    complete_policy(completed)
    return completed


def _instance_name(message: model_config.ModelConfig, index: int) -> str:
    """As Triton has them: group and number in it."""
    for number, group in enumerate(message.instance_group):
        if index < group.count:
            return f"{group.name or f'{message.name}_{number}'}_{index}"
        index -= group.count
    raise AssertionError("there are as many instances as the groups have")


def _launch(source: Source, message: model_config.ModelConfig, config: ModelConfig, index: int) -> Launch:
    name = _instance_name(message, index)
    seconds = {}
    for key, default in (("start_timeout_secs", _START_SECS), ("execute_timeout_secs", _EXECUTE_SECS)):
        try:
            seconds[key] = float(config.parameters.get(key, default))
        except ValueError:
            raise ModelConfigError(f"parameter {key}: expected a number of seconds") from None
        if not 0 < seconds[key] <= TIMEOUT_MAX:         # nor nan
            raise ModelConfigError(f"parameter {key}: expected a number of seconds up to {TIMEOUT_MAX:g}")
    arguments = {
        "model_config": json.dumps(to_json(message)),
        "model_instance_kind": "CPU", "model_instance_name": name, "model_instance_device_id": "0",
        "model_repository": str(source.folder), "model_version": str(source.version), "model_name": source.name}
    added = config.sequences.datatypes if config.sequences else {}
    return Launch(
        name, source.file, arguments,
        inputs={**{spec.name: spec.datatype for spec in config.inputs}, **added},
        outputs={**{spec.name: spec.datatype for spec in config.outputs}, **added},
        is_decoupled=config.decoupled, is_iterative=config.sequences is not None and config.sequences.policy.iterative,
        start_secs=seconds["start_timeout_secs"], execute_secs=seconds["execute_timeout_secs"])


class _Asked:
    """A request that a Python model makes of another model; and, where that answers, the reply to it."""

    def __init__(self, find: Find, trace_of: Callable[[int], Trace | None], loop: asyncio.AbstractEventLoop,
                 open_: dict[int, _Asked], message: Message, answer: Answer) -> None:
        """trace_of: of a request that the model was given, by its number. open_: those of a process that have not
        ended, by their numbers; it adds and removes itself, on the loop."""
        self._find, self._trace_of, self._open, self._message, self._answer = find, trace_of, open_, message, answer
        self._decoupled = self._said_last = self.gone = False
        self._submitted: tuple[Model, Request] | None = None
        post(loop, self._submit)

    def send(self, response: Any) -> None:
        """Its tensors were sent when they were encoded."""
        self._end()

    def part(self, response: Any, is_last: bool = False) -> None:
        """Likewise."""
        self._said_last = is_last

    def end(self) -> None:
        """What says only that there are no more is a response without tensors, as in Triton."""
        self._end()
        self._answer({"final": True} if self._said_last else {"final": True, "parameters": {}}, {})

    def fail(self, error: Exception) -> None:
        self._end()
        self._answer(refusal(error), {})

    def withdraw(self) -> None:
        submitted = self._submitted
        self.fail(CancelledError("the request was cancelled by the model that made it"))
        if submitted:
            model, request = submitted
            model.cancel(request)

    def _end(self) -> None:
        self.gone = True
        self._open.pop(self._message.head["number"], None)
        submitted, self._submitted = self._submitted, None      # whose reply this is: a circle
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
        """Sends the outputs, on the thread that made them, while they are valid."""
        if self.gone:
            return
        self._answer({"final": not self._decoupled, "parameters": dict(parameters_of(computed))}, {
            name: typed(np.asarray(computed[name])) for name in self._outputs if name in computed})
