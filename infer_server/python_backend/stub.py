"""The process of a Python model: imports its model.py, and executes what the server sends.

    python -m infer_server.python_backend.stub DESCRIPTOR       of a Unix socket
"""
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
from infer_server.python_backend.channel import Channel, ClosedError, Message, Tensors, Typed, typed
from infer_server.python_backend.window import OpenRequests

_RESPONSE_BYTES = 4096          # of a response in the server, beside its tensors
_NONE: Tensors = MappingProxyType({})
_Responses = queue.SimpleQueue[Message | None]


class Process:
    """Reads messages on a thread of its own; the model runs on the main one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._work: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._open = OpenRequests()
        self._senders: dict[int, pb_utils.ResponseSender] = {}      # of requests between two executions
        self._asked: dict[int, _Responses] = {}         # requests of other models, until their last response
        self._numbers = itertools.count()
        self._in_background = False                     # an asynchronous execute
        self._starting = threading.Lock()
        self._running: asyncio.AbstractEventLoop | None = None      # see _loop
        self._model: Any = None                         # once it is initialised
        self._name = ""                                 # of the instance

    def run(self) -> None:
        """Serves until the server closes the connection, or says that it is enough."""
        threading.Thread(target=self._read, daemon=True).start()
        while (message := self._work.get()) is not None:
            kind = message.head["kind"]
            try:
                if kind == "initialize":
                    self._model, config = self._initialize(message.head)
                    self._channel.send({"kind": "initialized", "config": config,
                                        "says_ready": hasattr(self._model, "is_ready")})
                elif kind == "execute":
                    self._execute(self._model, message)
                else:
                    if hasattr(self._model, "finalize"):
                        self._model.finalize()
                    self._channel.send({"kind": "finalized"})
                    return
            except ClosedError:
                return
            except BaseException as error:      # a model may raise anything, SystemExit among it
                traceback.print_exc()
                self._channel.send({"kind": "failed", "error": f"{type(error).__name__}: {error}"})

    # ---- what pb_utils asks for
    def respond(self, request: int, response: pb_utils.InferenceResponse | None, final: bool) -> None:
        head = {"kind": "response", "request": request, "final": final, **_beside(response)}
        tensors = [self._outputs(response)] if response else []
        if tensors and pb_utils.is_decoupled:
            size = sum(tensor.array.nbytes for tensor in tensors[0].values())
            self._open.wait_for_room(request, _RESPONSE_BYTES + size)
        self._channel.send(head, tensors)
        if final:
            self._open.end(request)

    def is_cancelled(self, request: int) -> bool:
        return self._open.is_cancelled(request)

    def log(self, level: str, text: str) -> None:
        self._channel.send({"kind": "log", "level": level, "text": str(text)})

    def infer(self, request: pb_utils.InferenceRequest, decoupled: bool) -> pb_utils.ResponseIterator:
        number, answers = self._asking()
        tensors = {tensor.name(): typed(tensor.as_numpy()) for tensor in request.inputs()}
        self._channel.send({
            "kind": "infer", "number": number, "model": request.model_name(), "version": request.model_version(),
            "outputs": request.requested_output_names(), "id": request.request_id(), "timeout": request.timeout(),
            "priority": request.priority(), "parameters": json.loads(request.parameters()),
            "sequence": request.correlation_id(), "flags": request.flags(), "decoupled": decoupled,
            "traced_by": request.trace().number}, [tensors])
        responses = pb_utils.ResponseIterator(self._answers(number, answers),
                                              partial(self.tell, "withdraw", asked=number))
        weakref.finalize(responses, self._asked.pop, number, None).atexit = False      # not all of them may be read
        return responses

    def ask(self, kind: str, tensors: Tensors = _NONE, **head: Any) -> Any:
        """What the server says. Raises TritonModelException: that it refuses."""
        number, answers = self._asking()
        self._channel.send({"kind": kind, "number": number, **head}, [tensors])
        message = answers.get()
        del self._asked[number]
        if message is None or "error" in message.head:
            raise pb_utils.TritonModelException(message.head["error"] if message else "the server is gone")
        return message.head["value"]

    def tell(self, kind: str, **head: Any) -> None:
        """What needs no answer."""
        self._channel.send({"kind": kind, "number": -1, **head})

    def _asking(self) -> tuple[int, _Responses]:
        """The number of what is asked, and where its answers will come. Raises TritonModelException: in a process that
        the model forked nobody reads them."""
        if os.getpid() != self._pid:
            raise pb_utils.TritonModelException("a process that a model has forked cannot ask the server: ask in the "
                                                "model's own, on a thread if need be")
        number, answers = next(self._numbers), _Responses()
        self._asked[number] = answers
        return number, answers

    def _answers(self, number: int, answers: _Responses) -> Iterator[pb_utils.InferenceResponse]:
        while (message := answers.get()) is not None:
            final = message.head["final"]
            if final:
                self._asked.pop(number, None)
            if message.head.get("error"):
                yield pb_utils.InferenceResponse(error=pb_utils.TritonError(
                    message.head["error"], message.head["code"]))
            elif "parameters" in message.head:          # else the one before was the last
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
                elif kind == "taken":
                    self._open.taken(message.head["request"])
                elif kind == "forget":          # it is not executed again: what its model has kept of it alone knows
                    self._open.end(message.head["request"])
                    if sender := self._senders.pop(message.head["request"], None):
                        sender.is_forgotten = True
                elif kind == "check":
                    threading.Thread(target=self._check, daemon=True).start()       # beside what is executed
                elif kind == "answered":
                    if answers := self._asked.get(message.head["number"]):
                        answers.put(message)
                else:
                    for each in message.head.get("requests", ()):
                        self._open.open(each["number"], each.pop("window"))
                    self._work.put(message)
        except ClosedError:
            os._exit(0)                 # whatever the model does: nobody will ever ask again
        except BaseException:           # no memory, no descriptors: else the server would wait for what nobody reads
            traceback.print_exc()
            os._exit(1)

    def _check(self) -> None:
        """Asks the model whether it is ready, and says so."""
        try:
            ready = self._model.is_ready()
            if asyncio.iscoroutine(ready):
                ready = asyncio.run_coroutine_threadsafe(ready, self._loop).result()
            if not isinstance(ready, bool):
                raise TypeError(f"is_ready() must return a boolean value, got a {type(ready).__name__}")
        except BaseException as error:      # sys.exit() would end this thread alone, and leave who asks without answer
            self.log("error", f"is_ready() failed: {type(error).__name__}: {error}")
            ready = False
        self._channel.send({"kind": "checked", "ready": ready})

    def _initialize(self, head: Mapping[str, Any]) -> tuple[Any, str]:
        path, arguments = Path(head["path"]), head["arguments"]
        self._name = arguments["model_instance_name"]
        pb_utils.model_dir = str(path.parent)
        sys.path[:0] = [str(path.parent), str(path.parent.parent)]
        # Of a package named as its version, as in Triton: what it imports may be relative to it.
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{path.stem}", path)
        assert spec and spec.loader
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "TritonPythonModel"):
            raise pb_utils.TritonModelException(f"{path} has no class TritonPythonModel")
        made = module.TritonPythonModel
        config = json.loads(arguments["model_config"])
        if head["complete"] and hasattr(made, "auto_complete_config"):
            completed = made.auto_complete_config(pb_utils.ModelConfig(config))
            if not isinstance(completed, pb_utils.ModelConfig):
                raise pb_utils.TritonModelException(f"auto_complete_config function in model '{config['name']}' must "
                                                    "return a valid pb.ModelConfig object")
            config = completed.as_dict()
            arguments["model_config"] = json.dumps(config)
        if not hasattr(made, "execute"):
            raise pb_utils.TritonModelException(f"{path}: TritonPythonModel has no execute")
        pb_utils.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        # What an iterative one wants again must be known when its execution ends.
        self._in_background = pb_utils.is_decoupled and not config.get("sequence_batching", {}).get(
            "iterative_sequence")
        model = made()
        if hasattr(model, "initialize"):
            model.initialize(arguments)
        return model, json.dumps(config)

    def _execute(self, model: Any, message: Message) -> None:
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
            if answer:                                  # this was its last response
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
        except Exception as error:                      # of tensors that are none, or find no memory; none was sent
            failed = f"The response(s) of model '{self._name}' cannot be sent, message: "
            self._send_executed(batch, requests, [answer and _failed(error, failed) for answer in answers])

    def _send_executed(self, batch: int, requests: Sequence[pb_utils.InferenceRequest],
                       answers: Sequence[pb_utils.InferenceResponse | None]) -> None:
        self._channel.send({"kind": "executed", "batch": batch,
                            "responses": [_said(*each) for each in zip(requests, answers, strict=True)]},
                           [self._outputs(answer) for answer in answers])

    def _awaited(self, coroutine: Coroutine[Any, Any, Any], requests: Sequence[pb_utils.InferenceRequest]) -> Any:
        """What an asynchronous execute returns. For that of a decoupled model nobody waits: its requests are answered
        by their senders, beside those of the next batches."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if not self._in_background:
            return future.result()
        senders = [request.get_response_sender() for request in requests]
        future.add_done_callback(partial(_end_failed, senders))
        return None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Runs what is asynchronous in the model, on a thread of its own, as long as the process lives."""
        with self._starting:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                threading.Thread(target=_run, args=[self._running], daemon=True).start()
            return self._running

    def _answers_of(self, requests: Sequence[pb_utils.InferenceRequest], responses: Any
                    ) -> list[pb_utils.InferenceResponse | None]:
        """One for each request; None: its sender has sent, or will send, its responses."""
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
                    f"'{type(response)}'. What is to be sent before it is executed again, send by its response sender")
            if response is None and request.sender is None and not again:
                raise pb_utils.TritonModelException("execute returned None for a request whose response sender it "
                                                    "never asked for")
        return list(responses)

    def _outputs(self, response: pb_utils.InferenceResponse | None) -> dict[str, Typed]:
        if response is None:
            return {}
        return {tensor.name(): typed(tensor.as_numpy()) for tensor in response.output_tensors()}


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Ends the process with the loop: what is asynchronous in a model may call sys.exit(), which ends the loop alone,
    and whoever waits for what runs there would wait for ever."""
    try:
        loop.run_forever()
    except BaseException as error:
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) else 1
        os._exit(code if isinstance(code, int) else int(code is not None))


def _failed(error: BaseException, what: str = "") -> pb_utils.InferenceResponse:
    """The response to what has raised it. what: failed by that."""
    lines = traceback.format_exception(error)
    print("".join(lines), file=sys.stderr, end="")
    return pb_utils.InferenceResponse(error=f"{what}{type(error).__name__}: {error}\n" + "".join(
        traceback.format_exception(error, limit=-3)))


def _end_failed(senders: Sequence[pb_utils.ResponseSender], future: Future[Any]) -> None:
    """Ends what an asynchronous execute has not, if that has raised something or was cancelled."""
    if error := CancelledError() if future.cancelled() else future.exception():
        response = _failed(error)
        for sender in senders:
            if not sender.is_closed:
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _said(request: pb_utils.InferenceRequest, answer: pb_utils.InferenceResponse | None) -> dict[str, Any] | None:
    """What the server is told of an executed request beside its outputs; None: its sender has said, or will."""
    if answer:
        return _beside(answer)
    return {"again": True} if request.is_rescheduled else None


def _beside(response: pb_utils.InferenceResponse | None) -> dict[str, Any]:
    """What a response says beside its tensors."""
    if response is None:
        return {}
    error = response.error()
    return {"error": error.message(), "code": error.code()} if error else {
        "parameters": json.loads(response.parameters())}


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> list[pb_utils.Tensor]:
    return [pb_utils.Tensor(name, array) for name, array in arrays.items()]


def _leave_signals_to_the_server() -> None:
    """They go to all processes of a terminal or of a service, and the server drains this one. Not ignored, for what a
    model starts would inherit that; what it forks has them as before."""
    before = {number: signal.signal(number, lambda *_: None)
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1,
                             signal.SIGUSR2)
              if signal.getsignal(number) is not signal.SIG_IGN}

    kept = threading.local()            # a signal to what is forked waits until it is as before, and is not lost

    def hold() -> None:
        kept.mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept.mask)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=restore)


def main() -> None:
    _leave_signals_to_the_server()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [""]                     # ours is none of a model's, whose libraries may look (argparse, unittest)
    process = Process(channel)
    pb_utils.server = process
    sys.modules["triton_python_backend_utils"] = pb_utils
    process.run()


if __name__ == "__main__":
    main()
