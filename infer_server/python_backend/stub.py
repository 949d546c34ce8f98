"""Process of a Python model: import its model.py and execute the batches that the server sends."""
from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from infer_server.python_backend import pb_utils
from infer_server.python_backend.channel import ChannelMessage, ClosedError, MessageChannel, Tensors, Typed, typed
from infer_server.python_backend.window import OpenRequests

_RESPONSE_BYTES = 4096          # size of a response in the server in addition to its tensors
_NONE: Tensors = MappingProxyType({})
_Responses = queue.SimpleQueue[ChannelMessage | None]


class Stub:
    """Stub process. Messages are read on a separate thread; the model runs on the main thread."""

    def __init__(self, channel: MessageChannel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._work: queue.SimpleQueue[ChannelMessage | None] = queue.SimpleQueue()
        self._open = OpenRequests()
        self._senders: dict[int, pb_utils.ResponseSender] = {}      # senders of rescheduled requests
        self._calls: dict[int, _Responses] = {}         # open calls to the server, by number
        self._numbers = itertools.count()
        self._in_background = False                     # True if asynchronous executions are not awaited
        self._starting = threading.Lock()
        self._running: asyncio.AbstractEventLoop | None = None      # see _loop
        self._model: Any = None                         # None until it is initialised
        self._name = ""                                 # name of the instance

    def run(self) -> None:
        """Serve until the server closes the connection or asks to finalize."""
        threading.Thread(target=self._read, daemon=True).start()
        while (message := self._work.get()) is not None:
            kind = message.head["kind"]
            try:
                if kind == "initialize":
                    self._model, config = self._initialize(message.head)
                    self._channel.send({"kind": "initialized", "config": config,
                                        "has_is_ready": hasattr(self._model, "is_ready")})
                elif kind == "execute":
                    self._execute(self._model, message)
                else:
                    if hasattr(self._model, "finalize"):
                        self._model.finalize()
                    self._channel.send({"kind": "finalized"})
                    return
            except ClosedError:
                return
            except BaseException as error:      # a model may raise anything, including SystemExit
                traceback.print_exc()
                self._channel.send({"kind": "failed", "error": f"{type(error).__name__}: {error}"})

    # ---- pb_utils.Server
    def respond(self, request: int, response: pb_utils.InferenceResponse | None, final: bool) -> None:
        head = {"kind": "response", "request": request, "final": final, **_metadata(response)}
        tensors = [self._outputs(response)] if response else []
        if tensors and pb_utils.is_decoupled:
            size = sum(tensor.array.nbytes for tensor in tensors[0].values())
            self._open.wait_to_send(request, _RESPONSE_BYTES + size)
        self._channel.send(head, tensors)
        if final:
            self._open.end(request)

    def is_cancelled(self, request: int) -> bool:
        return self._open.is_cancelled(request)

    def log(self, level: str, text: str) -> None:
        self._channel.send({"kind": "log", "level": level, "text": str(text)})

    def infer(self, request: pb_utils.InferenceRequest, decoupled: bool) -> pb_utils.ResponseIterator:
        number, answers = self._begin_call()
        tensors = {tensor.name(): typed(tensor.as_numpy()) for tensor in request.inputs()}
        self._channel.send({
            "kind": "infer", "number": number, "model": request.model_name(), "version": request.model_version(),
            "outputs": request.requested_output_names(), "id": request.request_id(), "timeout": request.timeout(),
            "priority": request.priority(), "parameters": json.loads(request.parameters()),
            "sequence": request.correlation_id(), "flags": request.flags(), "decoupled": decoupled,
            "traced_by": request.trace().number}, [tensors])
        responses = pb_utils.ResponseIterator(self._answers(number, answers),
                                              partial(self.notify, "withdraw", call=number))
        weakref.finalize(responses, self._calls.pop, number, None).atexit = False      # they may not be read to the end
        return responses

    def call(self, kind: str, tensors: Tensors = _NONE, **head: Any) -> Any:
        """Call the server and return its answer. Raises TritonModelException if the server refuses."""
        number, answers = self._begin_call()
        self._channel.send({"kind": kind, "number": number, **head}, [tensors])
        message = answers.get()
        del self._calls[number]
        if message is None or "error" in message.head:
            raise pb_utils.TritonModelException(message.head["error"] if message else "the server is gone")
        return message.head["value"]

    def notify(self, kind: str, **head: Any) -> None:
        """Send a message to the server that has no answer."""
        self._channel.send({"kind": kind, "number": -1, **head})

    def _begin_call(self) -> tuple[int, _Responses]:
        """Return the number of a new call and the queue of its answers. Raises in a forked process, which has none."""
        if os.getpid() != self._pid:
            raise pb_utils.TritonModelException("a process that a model has forked cannot call the server: call it in "
                                                "the model's own process, on a thread if need be")
        number, answers = next(self._numbers), _Responses()
        self._calls[number] = answers
        return number, answers

    def _answers(self, number: int, answers: _Responses) -> Iterator[pb_utils.InferenceResponse]:
        while (message := answers.get()) is not None:
            final = message.head["final"]
            if final:
                self._calls.pop(number, None)
            if message.head.get("error"):
                yield pb_utils.InferenceResponse(error=pb_utils.TritonError(
                    message.head["error"], message.head["code"]))
            elif "parameters" in message.head:          # otherwise the previous response was the last
                tensors = _tensors(message.tensors[0]) if message.tensors else []
                yield pb_utils.InferenceResponse(tensors, parameters=message.head["parameters"])
            if final:
                return
        raise pb_utils.TritonModelException("the server is gone")

    # ---- the model
    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                kind = message.head["kind"]
                if kind == "cancel":
                    self._open.cancel(message.head["request"])
                elif kind == "consumed":
                    self._open.consumed(message.head["request"])
                elif kind == "forget":          # the request has ended between two executions
                    self._open.end(message.head["request"])
                    if sender := self._senders.pop(message.head["request"], None):
                        sender.is_forgotten = True
                elif kind == "check":
                    threading.Thread(target=self._check, daemon=True).start()       # concurrently with execute()
                elif kind == "answered":
                    if answers := self._calls.get(message.head["number"]):
                        answers.put(message)
                else:
                    for each in message.head.get("requests", ()):
                        self._open.open(each["number"], each.pop("window"))
                    self._work.put(message)
        except ClosedError:
            os._exit(0)                 # even while the model executes: the server is gone
        except BaseException:           # e.g. out of memory: otherwise the server would wait for ever
            traceback.print_exc()
            os._exit(1)

    def _check(self) -> None:
        """Call the model's is_ready() and send the result."""
        try:
            ready = self._model.is_ready()
            if asyncio.iscoroutine(ready):
                ready = asyncio.run_coroutine_threadsafe(ready, self._loop).result()
            if not isinstance(ready, bool):
                raise TypeError(f"is_ready() must return a boolean value, got a {type(ready).__name__}")
        except BaseException as error:      # including sys.exit(), which would end only this thread without an answer
            self.log("error", f"is_ready() failed: {type(error).__name__}: {error}")
            ready = False
        self._channel.send({"kind": "checked", "ready": ready})

    def _initialize(self, head: Mapping[str, Any]) -> tuple[Any, str]:
        path, arguments = Path(head["path"]), head["arguments"]
        self._name = arguments["model_instance_name"]
        pb_utils.model_dir = str(path.parent)
        sys.path[:0] = [str(path.parent), str(path.parent.parent)]
        # The package is named after the version, as in Triton, so that relative imports work.
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{path.stem}", path)
        assert spec and spec.loader
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "TritonPythonModel"):
            raise pb_utils.TritonModelException(f"{path} has no class TritonPythonModel")
        model_class = module.TritonPythonModel
        config = json.loads(arguments["model_config"])
        if head["complete"] and hasattr(model_class, "auto_complete_config"):
            completed = model_class.auto_complete_config(pb_utils.ModelConfig(config))
            if not isinstance(completed, pb_utils.ModelConfig):
                raise pb_utils.TritonModelException(f"auto_complete_config function in model '{config['name']}' must "
                                                    "return a valid pb.ModelConfig object")
            config = completed.as_dict()
            arguments["model_config"] = json.dumps(config)
        if not hasattr(model_class, "execute"):
            raise pb_utils.TritonModelException(f"{path}: TritonPythonModel has no execute")
        pb_utils.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        # Iterative models are awaited: whether requests are rescheduled must be known when the execution ends.
        self._in_background = pb_utils.is_decoupled and not config.get("sequence_batching", {}).get(
            "iterative_sequence")
        model = model_class()
        if hasattr(model, "initialize"):
            model.initialize(arguments)
        return model, json.dumps(config)

    def _execute(self, model: Any, message: ChannelMessage) -> None:
        requests = [pb_utils.InferenceRequest(inputs=_tensors(arrays), **described)
                    for described, arrays in zip(message.head["requests"], message.tensors, strict=True)]
        for request in requests:
            request.sender = self._senders.pop(request.number, None)
        try:
            responses = model.execute(requests)
            if asyncio.iscoroutine(responses):
                responses = self._awaited(responses, requests)
            answers = self._answers_of(requests, responses)
        except Exception as error:
            failed = f"Failed to process the request(s) for model '{self._name}', message: "
            answers = [_failed(error, failed)] * len(requests)
        for request, answer in zip(requests, answers, strict=True):
            if answer:                                  # the final response
                self._open.end(request.number)
                if request.sender:
                    request.sender.is_closed = True
            if request.is_rescheduled and request.sender and not request.sender.is_closed:
                self._senders[request.number] = request.sender
        batch = message.head["batch"]
        try:
            self._send_executed(batch, requests, answers)
        except ClosedError:
            raise
        except Exception as error:                      # invalid tensors or no memory; nothing was sent
            failed = f"The response(s) of model '{self._name}' cannot be sent, message: "
            self._send_executed(batch, requests, [answer and _failed(error, failed) for answer in answers])

    def _send_executed(self, batch: int, requests: Sequence[pb_utils.InferenceRequest],
                       answers: Sequence[pb_utils.InferenceResponse | None]) -> None:
        self._channel.send({"kind": "executed", "batch": batch,
                            "responses": [_response_head(*each) for each in zip(requests, answers, strict=True)]},
                           [self._outputs(answer) for answer in answers])

    def _awaited(self, coroutine: Coroutine[Any, Any, Any], requests: Sequence[pb_utils.InferenceRequest]) -> Any:
        """Return the result of an asynchronous execute.

        That of a decoupled model is not awaited and uses response senders.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if not self._in_background:
            return future.result()
        senders = [request.get_response_sender() for request in requests]
        future.add_done_callback(partial(_end_failed, senders))
        return None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Event loop on its own thread for the asynchronous methods of the model."""
        with self._starting:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                threading.Thread(target=_run, args=[self._running], daemon=True).start()
            return self._running

    def _answers_of(self, requests: Sequence[pb_utils.InferenceRequest], responses: Any
                    ) -> list[pb_utils.InferenceResponse | None]:
        """Return one response for each request; None if its response sender sends the responses."""
        if responses is None:
            responses = [None] * len(requests)
        if not isinstance(responses, list | tuple):
            raise pb_utils.TritonModelException(
                f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(requests):
            raise pb_utils.TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}")
        for request, response in zip(requests, responses, strict=True):
            if not isinstance(response, pb_utils.InferenceResponse | None):
                raise pb_utils.TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'.")
            if response is not None and pb_utils.is_decoupled:
                raise pb_utils.TritonModelException(
                    f"Python model '{self._name}' is using the decoupled mode and the execute function must return "
                    "None. Its responses are sent by the requests' get_response_sender()")
            again = request.is_rescheduled
            if again and response is not None:
                raise pb_utils.TritonModelException(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(response)}'. Use its response sender to send responses before it is executed again")
            if response is None and request.sender is None and not again:
                raise pb_utils.TritonModelException("execute returned None for a request without a response sender; "
                                                    "return a response, or call get_response_sender()")
        return list(responses)

    def _outputs(self, response: pb_utils.InferenceResponse | None) -> dict[str, Typed]:
        if response is None:
            return {}
        return {tensor.name(): typed(tensor.as_numpy()) for tensor in response.output_tensors()}


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop; end the process with it, because sys.exit() in a coroutine would end only the loop."""
    try:
        loop.run_forever()
    except BaseException as error:
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) else 1
        os._exit(code if isinstance(code, int) else int(code is not None))


def _failed(error: BaseException, prefix: str = "") -> pb_utils.InferenceResponse:
    """Return the error response for an exception, with `prefix` in front of its message, and print the traceback."""
    lines = traceback.format_exception(error)
    print("".join(lines), file=sys.stderr, end="")
    return pb_utils.InferenceResponse(error=f"{prefix}{type(error).__name__}: {error}\n" + "".join(
        traceback.format_exception(error, limit=-3)))


def _end_failed(senders: Sequence[pb_utils.ResponseSender], future: Future[Any]) -> None:
    """Fail the requests that an asynchronous execute left open when it raised or was cancelled."""
    if error := CancelledError() if future.cancelled() else future.exception():
        response = _failed(error)
        for sender in senders:
            if not sender.is_closed:
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _response_head(request: pb_utils.InferenceRequest, answer: pb_utils.InferenceResponse | None
                   ) -> dict[str, Any] | None:
    """Return the metadata of an executed request's response; None if its response sender sends the responses."""
    if answer:
        return _metadata(answer)
    return {"again": True} if request.is_rescheduled else None


def _metadata(response: pb_utils.InferenceResponse | None) -> dict[str, Any]:
    """Return the error or the parameters of a response."""
    if response is None:
        return {}
    error = response.error()
    return {"error": error.message(), "code": error.code()} if error else {
        "parameters": json.loads(response.parameters())}


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> list[pb_utils.Tensor]:
    return [pb_utils.Tensor(name, array) for name, array in arrays.items()]


def _leave_signals_to_the_server() -> None:
    """Catch signals without effect: they reach all processes of a terminal or service, and the server drains this one.

    They are not ignored, since child processes would inherit that; in forked processes the old handlers are restored.
    """
    before = {number: signal.signal(number, lambda *_: None)
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1,
                             signal.SIGUSR2)
              if signal.getsignal(number) is not signal.SIG_IGN}

    saved = threading.local()           # blocks signals during a fork until the child has restored its handlers

    def block() -> None:
        saved.mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, saved.mask)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


def main() -> None:
    _leave_signals_to_the_server()
    channel = MessageChannel(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [""]                     # libraries of the model may parse it (argparse, unittest)
    process = Stub(channel)
    pb_utils.server = process
    sys.modules["triton_python_backend_utils"] = pb_utils
    process.run()
