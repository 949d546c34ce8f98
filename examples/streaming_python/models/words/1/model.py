"""Send the words of a text one by one, as a language model sends tokens."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
            limit = pb_utils.get_input_tensor_by_name(request, "max_words")
            sender = request.get_response_sender()
            for word in text.split()[:limit.as_numpy()[0] if limit else None]:
                if sender.is_cancelled():               # its client has left
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("word", np.array([word], np.object_))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
