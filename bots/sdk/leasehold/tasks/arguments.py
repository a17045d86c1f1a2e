"""The arguments and the value of one call of a task: as JSON of its job, and back where they are wanted.

Of the standard input, `typed` lists the arguments that a codec has encoded, by their place or their name. What is JSON
is in no such list, and comes back as it is, whatever the function is annotated with.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.tasks.codecs import Codec, codec_of
from leasehold.tasks.node_results import Inputs, numbers_of, with_placeholders
from leasehold.tasks.options import Concurrency, Unique, parameters_of
from leasehold.transport import Record
from leasehold.wire import JsonSerialiser, Serialiser, check_json, check_name, json_text

#: The arguments of one call: by their places, or by their names.
Arguments = tuple[Any, ...] | Mapping[str, Any]

#: The most bytes of the standard input of a job, and so of the arguments of one call. The command itself needs some.
MAX_ARGUMENTS = 255 * 1024


@dataclass(frozen=True)
class CallForm:
    """What a function takes and returns.

    codecs: of its parameters. result: of its value. problem: why its annotations cannot be read; None = they can.
    """

    signature: inspect.Signature
    codecs: Mapping[str, Codec | None]
    result: Codec | None
    problem: str | None = None

    def names(self, count: int) -> Iterator[tuple[str, Codec | None]]:
        """Yield the first `count` positional arguments: `amount`, or `amounts.3` of `*amounts`, each with its codec."""
        named = 0
        for parameter in self.signature.parameters.values():
            several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
            for place in range(count - named if several else min(1, count - named)):
                yield f"{parameter.name}.{place}" if several else parameter.name, self.codecs.get(parameter.name)
                named += 1

    def codec(self, name: str) -> Codec | None:
        """Return the codec of a named argument, which `**others` may take."""
        if name in self.signature.parameters:
            return self.codecs.get(name)
        others = [each for each in self.signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
        return self.codecs.get(others[0].name) if others else None


@lru_cache(maxsize=4096)
def form_of(function: Callable[..., Any]) -> CallForm:
    """Return the form of a function. Its annotations are read when they are needed, and may name what follows it."""
    signature = inspect.signature(function)
    try:
        codecs = {name: codec_of(annotation) for name, annotation in get_type_hints(function).items()}
    except Exception as error:
        # Such as a name that is imported for type checkers alone. Nobody needs it as long as all values are JSON.
        return CallForm(signature, {}, None, f"{type(error).__name__}: {error}")
    return CallForm(signature, codecs, codecs.pop("return", None))


#: The most characters of the refusal of a call.
MAX_SAID = 500


def encode_call(
    function: Callable[..., Any],
    serialiser: Serialiser,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    called: str = "the task",
    in_graph: bool = False,
) -> str:
    """Return the standard input of the job that makes this call.

    called: what the function is called in a refusal.

    in_graph: arguments may hold results of nodes; `inputs` of the standard input lists these.
    Raises TypeError if the function cannot be called so, BadInput with the name of an argument that cannot be JSON.
    """
    form = form_of(function)
    try:
        form.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{called} is called as {function.__name__}{form.signature}: {error}"[:MAX_SAID]) from None
    names = list(form.names(len(args)))
    typed: list[int | str] = []
    nodes: set[int] = set()

    def encoded(place: int | str, name: str, codec: Codec | None, value: Any) -> Any:
        of_value: set[int] = set()
        try:
            filled = with_placeholders(value, of_value) if in_graph else value
            if of_value:
                if type(serialiser) is not JsonSerialiser:
                    raise ValueError("cannot be the result of a node in a pool with a serialiser of its own")
                # What else it holds is JSON, because a codec takes no value that is not there yet.
                nodes.update(of_value)
                codec, value = None, filled
            found, by_codec = encode_value(serialiser, codec, value)
        except (TypeError, ValueError) as error:
            unread = f"; its annotation cannot be read: {form.problem}" if form.problem else ""
            unread = "; beside the result of a node an argument holds only JSON" if of_value else unread
            raise BadInput(name, (str(error) or type(error).__name__) + unread) from None
        if by_codec:
            typed.append(place)
        return found

    given = enumerate(zip(names, args, strict=True))
    positional = [encoded(place, name, codec, value) for place, ((name, codec), value) in given]
    named = {name: encoded(name, name, form.codec(name), value) for name, value in kwargs.items()}
    document: dict[str, Any] = {"args": positional, "kwargs": named} | ({"typed": typed} if typed else {})
    if nodes:
        document["inputs"] = sorted(nodes)
    stdin = _written(document)
    size = len(stdin.encode())
    if size > MAX_ARGUMENTS:
        sent = [*zip([name for name, _ in names], positional, strict=True), *named.items()]
        largest, _ = max(sent, key=lambda each: len(json_text(each[1]).encode()))
        raise BadInput(largest, f"the arguments have {size} bytes as JSON, at most {MAX_ARGUMENTS} are sent")
    return stdin


def _written(document: Record) -> str:
    """Return the text of a call: with escaped letters, or with letters as they are if it is too large so.

    All versions escape letters. A pool compares the text with that of an earlier request with the same key and of a
    schedule, and earlier runners read it in the encoding of their locale. What is too large so, they refused.
    """
    escaped = json.dumps(document, allow_nan=False)
    # A payload holds it as a text of JSON, in which each backslash is two.
    return escaped if len(json_text(escaped)) <= MAX_ARGUMENTS else json_text(document)


def decode_call(
    function: Callable[..., Any],
    serialiser: Serialiser,
    stdin: str,
    *,
    results: Callable[[], Mapping[str, Any]] | None = None,
    fetch: Callable[[Any], Record] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that a standard input holds, which `encode_call` made of them. Raises BadInput.

    results: reads the results of nodes that the call takes. fetch: returns the result that holds a large value of
    another call. None: there are no such results here.
    """
    try:
        document = json.loads(stdin)
        args, kwargs = list(document["args"]), dict(document["kwargs"])
        typed = list(document.get("typed", ()))
        asked = document.get("inputs")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput("stdin", f"is no JSON object with args and kwargs: {error}") from None
    if asked is not None and results is not None and fetch is not None and numbers_of(asked):
        typed += _fill(args, kwargs, Inputs(results(), fetch))
    if not typed:
        decode = serialiser.decode
        return [decode(each) for each in args], {name: decode(each) for name, each in kwargs.items()}
    form = form_of(function)
    names = list(form.names(len(args)))
    for place in typed:
        if type(place) is int and 0 <= place < len(names):
            name, codec = names[place]
            args[place] = _decoded(form, name, codec, args[place])
        elif isinstance(place, str) and place in kwargs:
            kwargs[place] = _decoded(form, place, form.codec(place), kwargs[place])
        else:
            raise BadInput("stdin", "names in `typed` what is no argument of the call")
    return args, kwargs


def _fill(args: list[Any], kwargs: dict[str, Any], inputs: Inputs) -> Iterator[int | str]:
    """Put the results of other calls into the arguments; yield those that a codec has encoded."""
    for place, value in enumerate(args):
        inputs.typed = False
        args[place] = inputs.fill(value)
        if inputs.typed:
            yield place
    for name, value in kwargs.items():
        inputs.typed = False
        kwargs[name] = inputs.fill(value)
        if inputs.typed:
            yield name


def encode_result(function: Callable[..., Any], serialiser: Serialiser, value: Any) -> Record:
    """Return what a call that returned this value leaves as its result. Raises TypeError and ValueError."""
    found, by_codec = encode_value(serialiser, form_of(function).result, value)
    return {"ok": found, "typed": True} if by_codec else {"ok": found}


def decode_result(function: Callable[..., Any], serialiser: Serialiser, document: Record) -> Any:
    """Return the value that a result of `encode_result` stands for. Raises BadInput if the annotation is another."""
    if not document.get("typed"):
        return serialiser.decode(document["ok"])
    form = form_of(function)
    return _decoded(form, "result", form.result, document["ok"])


def encode_value(serialiser: Serialiser, codec: Codec | None, value: Any) -> tuple[Any, bool]:
    """Return JSON of a value, and whether a codec is needed to decode it. Raises TypeError and ValueError.

    A serialiser of the pool's own takes all values, in the place of the codecs.
    """
    refused: Exception | None = None
    if type(serialiser) is not JsonSerialiser:
        value = serialiser.encode(value)
    elif codec is not None and value is not None:
        try:
            found = codec.encode(value)
            check_json(found)
            # What is empty was stored without a mark before there were codecs, and `unique` compares it.
            return found, bool(found) or type(found) is not type(value)
        except (ValueError, NameError) as error:
            refused = error
    try:
        check_json(value)
    except ValueError as error:
        raise (error if refused is None else ValueError(str(refused))) from None
    return value, False


def _decoded(form: CallForm, name: str, codec: Codec | None, found: Any) -> Any:
    if codec is None:
        reason = form.problem or "it has none that tells of its type"
        raise BadInput(name, f"cannot be read by the annotation of this process: {reason}")
    try:
        return codec.decode(found)
    except (ValueError, LookupError, TypeError, AttributeError, NameError, ArithmeticError) as error:
        raise BadInput(name, f"cannot be read by the annotation of this process: {error}") from None


def dedup_key(
    task: str,
    unique: Unique,
    function: Callable[..., Any],
    serialiser: Serialiser,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str:
    """Return the key by which a call joins an unfinished one of its task that is equal in the sense of `unique`."""
    said = _text_of(function, serialiser, args, kwargs) if isinstance(unique, bool) else unique(*args, **kwargs)
    if not isinstance(said, str):
        raise BadInput("unique", f"returned a '{type(said).__name__}', not a text")
    plain = f"{task}:{said}"
    if unique is not True and len(plain.encode()) <= wire.MAX_DEDUP_KEY_BYTES:
        return plain
    return f"{task[:100]}:{hashlib.sha256(plain.encode()).hexdigest()}"


_OTHERS = inspect.Parameter.VAR_KEYWORD


def _text_of(
    function: Callable[..., Any], serialiser: Serialiser, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return a text that is the same for equal arguments, by their names or places, given or left to the defaults."""
    bound = form_of(function).signature.bind(*args, **kwargs)
    bound.apply_defaults()
    parameters = bound.signature.parameters
    values = {
        name: dict(sorted(value.items())) if parameters[name].kind is _OTHERS else value
        for name, value in bound.arguments.items()
    }
    others = {name: value for name, value in values.items() if not _is_default(parameters[name], value)}
    by_place = [name for name, each in parameters.items() if each.kind not in (inspect.Parameter.KEYWORD_ONLY, _OTHERS)]
    last = max((place for place, name in enumerate(by_place) if name in others), default=-1)
    wanted = {*by_place[: last + 1], *others}
    bound.arguments = {name: value for name, value in values.items() if name in wanted}
    try:
        return encode_call(function, serialiser, bound.args, bound.kwargs)
    except BadInput:
        # A default before the last of them may be no JSON. Then those behind it are named.
        bound.arguments = others
        return encode_call(function, serialiser, bound.args, bound.kwargs)


def _is_default(parameter: inspect.Parameter, value: Any) -> bool:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, _OTHERS):
        return not value
    return type(value) is type(parameter.default) and bool(value == parameter.default)


def concurrency_lock(
    function: Callable[..., Any], concurrency: Concurrency, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the lock that a call takes, `KEY:NUMBER`. Raises BadInput if the key of these arguments is no name."""
    key, number = concurrency
    bound = form_of(function).signature.bind(*args, **kwargs)
    bound.apply_defaults()
    for name in parameters_of(key) if isinstance(key, str) else bound.arguments:
        with_placeholders(bound.arguments.get(name), nodes := set[int]())
        if nodes:
            raise BadInput("concurrency", f"takes '{name}', which is the result of a node and not known yet")
    if isinstance(key, str):
        try:
            made: Any = key.format(**bound.arguments)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            said = f"'{wire.escaped(key, 80)}' cannot be made of these arguments: {type(error).__name__}: {error}"
            raise BadInput("concurrency", said) from None
    else:
        made = key(*args, **kwargs)
        if not isinstance(made, str):
            raise BadInput("concurrency", f"returned a '{type(made).__name__}', not a text")
    return f"{check_name('concurrency', made)}:{number}"


def check_parameters(function: Callable[..., Any], concurrency: Concurrency | None) -> None:
    """Raise BadInput if the key of a `concurrency` names an argument that the function does not have."""
    if concurrency is None:
        return
    # Its annotations are not read yet: they may name what follows it.
    parameters = inspect.signature(function).parameters
    for name in parameters_of(concurrency[0]):
        if name not in parameters:
            raise BadInput(
                "concurrency",
                f"'{wire.escaped(name, 60)}' is no argument of '{function.__qualname__}'"
                + wire.suggestion(name, parameters),
            )
