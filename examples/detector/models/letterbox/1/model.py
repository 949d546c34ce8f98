"""Decode and letterbox picture files, by the function that calibration used."""
import io

import numpy as np
import triton_python_backend_utils as pb_utils
from letterbox import letterbox
from PIL import Image


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "file").as_numpy().ravel()
            images = np.concatenate([letterbox(Image.open(io.BytesIO(data))) for data in files])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("images", images)]))
        return responses
