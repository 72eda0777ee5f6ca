"""Makes the requests that an answer needs from a validated body and a model.

Turns prompts into tokens, checks them against vocabulary and context, and fills in defaults.
Knows neither HTTP nor the engine.
"""

import asyncio
import random
import time
import uuid
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ropewalk.model.chat.template import ChatTemplateError
from ropewalk.model.sampling import SamplingParams
from ropewalk.model.tokenizers.base import InvalidText
from ropewalk.server.errors import InvalidField, PromptTooLong, QueueFull, UnsupportedField
from ropewalk.server.long_work import LONG_TEXT, longer, off_loop
from ropewalk.server.openai.answers import Choice
from ropewalk.server.openai.schemas import (
    AS_MANY_AS_FIT,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    TemplateBody,
    text_of,
)
from ropewalk.server.openai.scores import spell_prompt
from ropewalk.server.openai.served_models import Served
from ropewalk.server.scheduling.kept import Kept, new_id
from ropewalk.server.scheduling.request import Drafts, Overflow, Request, check_length, too_long
from ropewalk.server.structured.compiler import Compiled
from ropewalk.server.structured.grammar import Grammar, Kind
from ropewalk.server.tools.conventions import Told
from ropewalk.server.tools.parser import Parser
from ropewalk.server.tools.prompts import template_input

DEFAULT_COMPLETION_TOKENS = 16
JSON_KINDS = (Kind.JSON_OBJECT, Kind.JSON_SCHEMA)
MAX_BYTES_PER_TOKEN = 16
MESSAGE_WORK = 32  # what a message costs besides its text, in characters
MAX_SCORES = 1 << 21  # log-probabilities of prompts in one answer, some 100 bytes each
RENDER_SECONDS = 4.0  # until a chat must be rendered, the wait for others included


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what echo repeats; None without echo. `thinking`: it ends within reasoning.

    `origin`: a kept sequence, whose tokens are the first. `predicted`: what the answer may be.
    """

    tokens: list[int]
    text: str | None = None
    thinking: bool = False
    origin: Kept | None = None
    predicted: "array[int] | None" = None


async def completion_prompts(
    body: CompletionBody, served: Served, origin: Kept | None = None
) -> list[Prompt]:
    """One Prompt per completion prompt, after `origin`. Raises PromptTooLong or InvalidField."""
    if body.echo and served.encoder_decoder is not None:
        raise UnsupportedField(
            f"echo is not possible with {served.name}, whose decoder never reads the prompt; "
            "leave it out",
            "echo",
        )

    def prepare() -> list[Prompt]:
        named = zip(each_of("prompt", len(body.prompts)), body.prompts, strict=True)
        return [_prompt(param, source, body, served, origin) for param, source in named]

    return await off_loop(prepare, sum(map(len, body.prompts)))


def each_of(param: str, count: int) -> list[str]:
    """How a client finds each of what it sent in one field."""
    return [f"{param}[{i}]" for i in range(count)] if count > 1 else [param]


def _prompt(
    param: str,
    source: str | list[int],
    body: CompletionBody,
    served: Served,
    origin: Kept | None,
) -> Prompt:
    before = [] if origin is None else origin.tokens
    if isinstance(source, str):
        text: str | None = source
        begins = body.add_special_tokens and origin is None
        tokens = [*before, *encode_now(source, served, bos=begins, param=param)]
        check_prompt(tokens, served, param)
    else:
        tokens = [*before, *source]
        check_ids(tokens, served, param)
        check_prompt(tokens, served, param)
        text = "".join(spell_prompt(served.tokenizer, tokens)) if body.echo else None
    return Prompt(tokens, text if body.echo else None, origin=origin)


async def chat_prompt(body: ChatBody, served: Served, *, fits: bool = True) -> Prompt:
    """The messages in the model's chat template. Raises QueueFull besides, where it is busy.

    fits: whether the context has to hold it.
    """
    text = await chat_text(body, body.messages, served)
    tokens = await encode(text, served, bos=body.add_special_tokens, param="messages")
    if fits:
        check_prompt(tokens, served, "messages")
    think = served.conventions.format.think
    thinking = think is not None and text.rstrip().endswith(think[0])
    return Prompt(tokens, thinking=thinking, predicted=await _predicted(body, served))


async def _predicted(body: ChatBody, served: Served) -> "array[int] | None":
    """What the client expects, as far as an answer could have it."""
    if body.prediction is None:
        return None
    whole = text_of(body.prediction.content).encode()
    text = whole[: MAX_BYTES_PER_TOKEN * served.max_context].decode(errors="ignore")
    tokens = await encode(text, served, bos=False, param="prediction")
    known = (token for token in tokens if token < served.vocab_size)
    return array("i", islice(known, served.max_context))


async def chat_text(body: TemplateBody, messages: Sequence[Message], served: Served) -> str:
    """What the chat template makes of messages, tools and variables."""
    template = served.chat_template
    if template is None:
        raise UnsupportedField(
            f"the model {served.name} has no chat template; send it a text, as to /v1/completions",
            "messages",
        )
    if body.documents and not served.conventions.documents:
        raise UnsupportedField(
            f"the chat template of {served.name} takes no documents; put them into a message",
            "documents",
        )

    def prepare() -> tuple[Sequence[Mapping[str, object]], Mapping[str, object]]:
        plain = [message.plain() for message in messages]
        tools = [tool.plain() for tool in body.told_tools]
        _check_length([message["content"] for message in plain], served, "messages")
        _check_length(tools, served, "tools")
        _check_length(body.documents, served, "documents")
        _check_length(body.chat_template_kwargs, served, "chat_template_kwargs")
        told: Mapping[str, object] = {}
        if tools or any(len(message) > 2 for message in plain):  # than a role and a text
            plain, told = template_input(plain, tools, served.conventions)
        return plain, {**body.variables, **told, "documents": body.documents or None}

    size = sum(MESSAGE_WORK + len(message.content) for message in messages)
    if body.told_tools or body.documents or body.chat_template_kwargs:  # however long these are
        size += LONG_TEXT
    given, variables = await off_loop(prepare, size)
    rendered = template.begin(
        given, add_generation_prompt=body.add_generation_prompt, variables=variables
    )
    try:
        return await asyncio.wait_for(asyncio.wrap_future(rendered), RENDER_SECONDS)
    except TimeoutError:
        raise QueueFull(
            f"other chats keep the chat template of {served.name} busy; send this one again later"
        ) from None
    except ChatTemplateError as error:
        message = f"messages do not fit the chat template: {error}"
        raise InvalidField(message, "messages", quotes=True) from None


def _check_length(value: object, served: Served, param: str) -> None:
    """Of what a template is to make text of. Raises PromptTooLong if it is hopelessly long."""
    limit = MAX_BYTES_PER_TOKEN * served.max_context
    if longer(value, limit):
        raise too_long(param, f"more than {limit} characters", served.max_context)


async def encode(text: str, served: Served, *, bos: bool, param: str) -> list[int]:
    """Tokens of a text. Raises PromptTooLong, before tokenising, on hopelessly long ones."""
    return await off_loop(lambda: encode_now(text, served, bos=bos, param=param), len(text))


def encode_now(text: str, served: Served, *, bos: bool, param: str) -> list[int]:
    """As `encode`, for callers that are beside the event loop."""
    size, limit = len(text.encode()), MAX_BYTES_PER_TOKEN * served.max_context
    if size > limit:
        raise too_long(param, f"{size} bytes", served.max_context, f", so {limit} bytes at most")
    try:
        tokens = served.tokenizer.encode(text, bos=bos)
    except InvalidText as error:
        raise InvalidField(str(error), param) from None
    if bos and tokens and served.encoder_decoder is not None:
        tokens.append(served.encoder_decoder.end)
    return tokens


def check_prompt(
    tokens: Collection[int], served: Served, param: str, *, answered: bool = True
) -> None:
    if not tokens:
        raise InvalidField(f"{param} has no tokens; send at least one", param)
    if (highest := max(tokens)) >= served.vocab_size:
        raise InvalidField(
            f"{param} has a token with the id {highest}, which the tokenizer of {served.name} has "
            f"but the model does not: it embeds 0..{served.vocab_size - 1}; leave that token out",
            param,
        )
    prompt, source = (1, len(tokens)) if served.encoder_decoder else (len(tokens), 0)
    check_length(prompt, source, served.max_context, param=param, answered=answered)


def check_ids(
    ids: Collection[int], served: Served, param: str, *, vocab_size: int | None = None
) -> None:
    """Checks every id that a client sends. Raises InvalidField for one outside the vocabulary."""
    size = vocab_size or served.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise InvalidField(
            f"{param} has a token id outside 0..{size - 1}, the vocabulary of "
            f"{served.name}; send ids from /tokenize",
            param,
        )


def sampling_params(
    body: CompletionBody | ChatBody, served: Served, num_prompt: int
) -> SamplingParams:
    """Raises InvalidField for ids outside the vocabulary, PromptTooLong for too many tokens."""
    check_ids(body.stop_token_ids, served, "stop_token_ids")
    check_ids(body.logit_bias, served, "logit_bias")
    logprobs = body.wanted_logprobs
    if logprobs is not None and logprobs > served.vocab_size:
        raise InvalidField(
            f"logprobs of {logprobs} tokens were requested, but the vocabulary of {served.name} "
            f"has {served.vocab_size}; request fewer",
            "logprobs",
        )
    echoed = isinstance(body, CompletionBody) and body.echo
    model_stops = frozenset() if body.ignore_eos else served.stop_ids
    return SamplingParams(
        max_tokens=max(1, _max_tokens(body, served, num_prompt)),
        min_tokens=body.min_tokens,
        temperature=body.temperature if body.top_p else 0.0,  # a share of 0 holds one token
        top_p=body.top_p or 1.0,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop_ids=model_stops | frozenset(body.stop_token_ids),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echoed else None,
    )


def _max_tokens(body: GenerationBody, served: Served, num_prompt: int) -> int:
    room = served.room(num_prompt)
    wanted = body.wanted_tokens
    if wanted is None or wanted == AS_MANY_AS_FIT:
        short = wanted is None and isinstance(body, CompletionBody)
        wanted = min(room, DEFAULT_COMPLETION_TOKENS) if short else room
        if body.min_tokens > wanted:
            raise InvalidField(
                f"min_tokens ({body.min_tokens}) exceeds the {wanted} tokens that an answer gets "
                "here without a max_tokens; request fewer, or send max_tokens as well",
                "min_tokens",
            )
    if wanted > room and body.overflow == "refuse":
        makes = f"{num_prompt} prompt tokens and {wanted} max_tokens make {num_prompt + wanted}"
        if served.encoder_decoder is not None:
            makes = f"the start token and {wanted} max_tokens make {1 + wanted}"
        raise PromptTooLong(
            f"{makes}, but this model's maximum context length is {served.max_context}; request at "
            f"most {room}, or set overflow to shift or slide if the encoding allows it",
            "max_tokens" if body.max_tokens is not None else "max_completion_tokens",
        )
    return wanted


async def compiled_grammar(
    body: CompletionBody | ChatBody, prompt: Prompt, served: Served
) -> Compiled | None:
    """What the answers must satisfy, if anything. Raises InvalidField, or QueueFull."""
    grammar = form = body.grammar
    if isinstance(body, ChatBody) and (body.told_tools or form is not None):
        size = LONG_TEXT + 1 if form is None or body.told_tools else len(form.text)
        grammar = await off_loop(lambda: _chat_grammar(body, form, prompt, served), size)
    if grammar is None:
        return None
    if served.grammars is None:
        raise UnsupportedField(
            f"{grammar.param} is not possible with {served.name}, an encoder-decoder; leave it out",
            grammar.param,
        )
    return await served.grammars.compile(grammar)


def _chat_grammar(
    body: ChatBody, form: Grammar | None, prompt: Prompt, served: Served
) -> Grammar | None:
    """Calls where they must be, or of strict functions; else the form that the body asks for."""
    format, tools = served.conventions.format, [tool.function for tool in body.told_tools]
    if form is not None and not tools and (form.kind not in JSON_KINDS or not format.think):
        return form
    from ropewalk.server.tools.grammars import calls_or_form, strict_calls

    if not body.must_call:
        if form is None:
            if not any(tool.strict for tool in tools):
                return None
            schemas = {tool.name: tool.arguments if tool.strict else {} for tool in tools}
            return strict_calls(schemas, format, served.tokenizer, served.stop_ids)
        if form.kind not in JSON_KINDS:
            raise InvalidField(
                f"{form.param} cannot be combined with tools, unless they are required; send one "
                "of them",
                form.param,
            )
    else:
        form = None
    named = body.named_tool
    # A model that was not taught to call repeats itself where it may call again.
    taught = served.conventions.told is not Told.TEXT
    return calls_or_form(
        {tool.name: tool.arguments for tool in tools if named in (None, tool.name)},
        format,
        served.tokenizer,
        served.stop_ids,
        thinking=prompt.thinking,
        several=body.parallel_tool_calls and taught and named is None,
        form=form,
    )


def choices_for(
    body: CompletionBody | ChatBody,
    prompts: Sequence[Prompt],
    served: Served,
    salt: str,
    client: str = "",
    grammar: Compiled | None = None,
) -> list[Choice]:
    """`n` choices per prompt, each with its own request, random numbers and place in `grammar`."""
    check_count(len(prompts) * body.n, "n" if len(prompts) == 1 else "prompt", served)
    if body.keep:
        require_decoder(served, "keep")
    _check_scores(body, prompts)
    arrival = time.monotonic()
    choices: list[Choice] = []
    group = uuid.uuid4().hex if len(prompts) * body.n > 1 else ""
    for prompt in prompts:
        params = sampling_params(body, served, len(prompt.tokens))
        first: str | None = None  # the prompt's first request, from which the others fork
        for number in range(body.n):
            index = len(choices)
            tokens: list[int] = list(prompt.tokens)
            source: tuple[int, ...] = ()
            if served.encoder_decoder is not None:
                tokens, source = [served.encoder_decoder.start], tuple(prompt.tokens)
            request = Request(
                id=uuid.uuid4().hex,
                tokens=tokens,
                num_prompt=len(tokens),
                source=source,
                params=params,
                matcher=None if grammar is None else grammar.begin(),
                arrival=arrival,
                rng=choice_rng(body.seed, number),
                salt=salt if prompt.origin is None else prompt.origin.salt,
                client=client,
                group=group,
                priority=body.priority,
                overflow=Overflow(body.overflow),
                sibling=first,
                origin=prompt.origin,
                keep=new_id() if body.keep else "",
                drafts=Drafts(tokens, prompt.predicted),
            )
            if served.encoder_decoder is None and params.prompt_logprobs is None:
                first = first or request.id
            choices.append(
                Choice(
                    index,
                    request,
                    served.tokenizer,
                    stop=body.stop,
                    include_stop=body.include_stop_str_in_output,
                    stop_token_ids=frozenset(body.stop_token_ids),
                    echo=prompt.text or "",
                    prompt_alone=body.wanted_tokens == 0,
                    parser=_parser(body, prompt, served),
                )
            )
    return choices


def greedy_request(
    tokens: list[int], client: str, salt: str, *, max_tokens: int = 1, **more: Any
) -> Request:
    """A request for the most likely tokens; with a `pooling` among `more`, none follow at all."""
    return Request(
        id=uuid.uuid4().hex,
        tokens=tokens,
        num_prompt=len(tokens),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        arrival=time.monotonic(),
        rng=random.Random(0),
        client=client,
        salt=salt,
        **more,
    )


def require_decoder(served: Served, param: str) -> None:
    """Raises UnsupportedField: what an encoder returned is not kept."""
    if served.encoder_decoder is not None:
        raise UnsupportedField(
            f"{served.name} is an encoder-decoder, whose sequences are not kept; use a decoder",
            param,
        )


def _parser(body: CompletionBody | ChatBody, prompt: Prompt, served: Served) -> Parser | None:
    """What finds reasoning and calls in an answer; None for one that has text alone."""
    format = served.conventions.format
    if not isinstance(body, ChatBody) or not (body.told_tools or format.think or format.noise):
        return None
    if body.grammar is not None and body.grammar.kind not in JSON_KINDS and not body.told_tools:
        return None
    single = not body.parallel_tool_calls or body.named_tool is not None
    tools = {tool.function.name: tool.function.arguments for tool in body.told_tools}
    return Parser(format, tools, thinking=prompt.thinking, single=single)


def check_count(count: int, name: str, served: Served) -> None:
    """Refuses what would find the queue full however often it is sent."""
    if served.max_at_once is not None and count > served.max_at_once:
        raise InvalidField(
            f"{name} asks for {count} answers, but {served.name} takes at most "
            f"{served.max_at_once} at once (--max-seqs and --max-queue together); request fewer, "
            "or start the server with a larger --max-queue",
            name,
        )


def _check_scores(body: CompletionBody | ChatBody, prompts: Sequence[Prompt]) -> None:
    """Bounds memory: all log-probabilities are held until the first one is sent."""
    if not (isinstance(body, CompletionBody) and body.echo and body.logprobs is not None):
        return
    scores = sum(len(prompt.tokens) for prompt in prompts) * body.n * (1 + body.logprobs)
    if scores > MAX_SCORES:
        raise InvalidField(
            f"prompt, n and logprobs request {scores} log-probabilities, more than the limit of "
            f"{MAX_SCORES}; send fewer prompts at once",
            "prompt",
        )


def choice_rng(seed: int | None, index: int) -> random.Random:
    """The same seed gives the same numbers for the same choice; without a seed they differ."""
    if seed is None:
        return random.Random(random.SystemRandom().getrandbits(128))
    return random.Random(f"{seed}/{index}")


def combined_salt(key_salt: str, cache_salt: str | None) -> str:
    """Prefixes are shared only between requests whose key and cache_salt are both equal."""
    return key_salt if cache_salt is None else f"{key_salt}/{cache_salt}"
