"""Print the words of a stream as they arrive.

    python client.py localhost:8001 [TEXT]
"""
import sys
from queue import SimpleQueue

import numpy as np
import tritonclient.grpc as triton


def main(address: str, text: str = "one word at a time") -> None:
    answers: SimpleQueue[tuple[triton.InferResult | None, Exception | None]] = SimpleQueue()
    tensor = triton.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
    words = []
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("words", [tensor], enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=60)
            if error or result is None:
                raise error or RuntimeError("neither a result nor an error")
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            words.append(result.as_numpy("word")[0].decode())
            print(words[-1], flush=True)
        client.stop_stream()
    if words != text.split():
        sys.exit("words are missing")


if __name__ == "__main__":
    main(*sys.argv[1:])
