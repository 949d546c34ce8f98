"""Start a frontend worker process.

    python -m infer_server.frontend_workers DESCRIPTOR      descriptor of the link's Unix socket
"""
from infer_server.process import imported

if __name__ == "__main__":
    imported("infer_server.frontend_workers.process:main")()
