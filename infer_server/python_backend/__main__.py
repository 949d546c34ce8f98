"""Start the process of a Python model.

    python -m infer_server.python_backend DESCRIPTOR        descriptor of a connected Unix socket
"""
from infer_server.process import imported

if __name__ == "__main__":
    imported("infer_server.python_backend.stub:main")()
