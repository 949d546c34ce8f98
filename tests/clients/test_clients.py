"""Tests of both clients against a real server."""
from __future__ import annotations

import asyncio

import numpy as np
import pytest

from infer_server.clients import AsyncInferenceClient, InferenceClient
from infer_server.clients.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    ServerError,
    ServerUnavailableError,
    UnsupportedError,
)
from tests.clients.server import TIMEOUT_SECS, Doubler, serving

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_the_synchronous_client_makes_every_call() -> None:
    model = Doubler()
    with serving(model) as url, InferenceClient(url) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("doubler") and not client.is_model_ready("tripler")
        assert [(i.name, i.datatype, list(i.shape)) for i in client.model_metadata("doubler").inputs] == [
            ("x", "FP32", [-1, 4])]
        assert client.model_config("doubler").max_batch_size == 8
        y = client.infer("doubler", {"x": X}, "1", request_id="r7", priority=2)["y"]
        np.testing.assert_array_equal(y, 2 * X)
        assert model.received[0].id == "r7" and model.received[0].model_version == "1"
        assert model.received[0].parameters["priority"].uint64_param == 2
        assert client.statistics("doubler")[0].inference_count == 2


def test_the_asyncio_client_makes_every_call_and_many_at_once() -> None:
    async def use(url: str) -> None:
        async with AsyncInferenceClient(url) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("doubler")
            assert (await client.model_metadata("doubler")).outputs[0].name == "y"
            assert (await client.model_config("doubler")).name == "doubler"
            answers = await asyncio.gather(*(client.infer("doubler", {"x": X + n}) for n in range(20)))
            for n, answer in enumerate(answers):
                np.testing.assert_array_equal(answer["y"], 2 * (X + n))
            assert (await client.statistics("doubler"))[0].execution_count == 20

    with serving(Doubler(delay_s=0.02)) as url:
        asyncio.run(use(url))


def test_messages_over_four_megabytes_pass() -> None:
    x = np.ones((400_000, 4), np.float32)
    with serving(Doubler()) as url, InferenceClient(url) as client:
        np.testing.assert_array_equal(client.infer("doubler", {"x": x})["y"], 2 * x)


def test_a_client_that_limits_messages_refuses_a_larger_one() -> None:
    with serving(Doubler()) as url, InferenceClient(url, max_message_bytes=1000) as client, pytest.raises(
            InvalidRequestError, match="larger than max"):
        client.infer("doubler", {"x": np.ones((400, 4), np.float32)})


def test_a_failure_has_a_name_and_the_servers_message() -> None:
    with serving(Doubler(delay_s=600, fail_every=2, keeps_statistics=False)) as url, InferenceClient(url) as client:
        with pytest.raises(ModelNotFoundError, match="unknown model 'tripler'"):
            client.infer("tripler", {"x": X})
        with pytest.raises(InvalidRequestError, match=r"not \[2, 3\]"):
            client.infer("doubler", {"x": X[:, :3]})
        with pytest.raises(ServerError, match=f"{url}: ModelInfer: told to fail"):
            client.infer("doubler", {"x": X})
        with pytest.raises(DeadlineExceededError):
            client.infer("doubler", {"x": X}, timeout=0.02)
        with pytest.raises(UnsupportedError, match="no statistics here"):
            client.statistics()


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with InferenceClient("127.0.0.1:1") as client, pytest.raises(ServerUnavailableError, match="127.0.0.1:1"):
        client.is_server_live(timeout=TIMEOUT_SECS)


def test_the_asyncio_client_names_failures_too() -> None:
    async def use(url: str) -> None:
        async with AsyncInferenceClient(url) as client:
            with pytest.raises(ModelNotFoundError, match="unknown model 'tripler'"):
                await client.infer("tripler", {"x": X})

    with serving(Doubler()) as url:
        asyncio.run(use(url))
