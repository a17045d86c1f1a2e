"""Which blobs a tree of inputs, or a result, needs and the storage does not have. It asks; its caller makes the calls.

The program of the job looks by calls that block, and the door by others, so a look is a generator: it yields what it
wants to know, and is sent the answer.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from leasehold.errors import BadInput

from bots.farm.protos import remote_execution_pb2
from bots.farm.storage.upstream import MOST_READ, Digest, Upstream, parsed

#: Directories and files of a tree that are looked at; a look at more would take longer than anybody waits.
MOST_NODES = 200_000
#: Digests of one question: some 2.5 MB.
MOST_ASKED = 30_000
#: Missing blobs that a client is told of: it uploads those, and is told of more then.
MOST_TOLD = 1000


class Read(NamedTuple):
    """A wish for small blobs; the answer has those that are there, by their digests."""

    digests: Sequence[Digest]


class Find(NamedTuple):
    """A wish to know which of these blobs are missing; the answer names them."""

    digests: Sequence[Digest]


Look = Generator[Read | Find, Any, list[Digest]]


async def looked(upstream: Upstream, look: Look) -> list[Digest]:
    """Return what a look of the door has found. Raises BadInput, AioRpcError."""
    try:
        wish = next(look)
        while True:
            ask: Any = upstream.read_all if isinstance(wish, Read) else upstream.missing
            wish = look.send(await ask(wish.digests))
    except StopIteration as ended:
        found: list[Digest] = ended.value
        return found


def missing_of_action(action: Any) -> Look:
    """Return what is not there of the command and the inputs of an Action. Raises BadInput."""
    absent = yield from _missing([Digest.read(action.command_digest, "command_digest")])
    absent += yield from missing_inputs(Digest.read(action.input_root_digest, "input_root_digest"))
    return absent


def missing_inputs(root: Digest) -> Look:
    """Return the directories and files below a directory that are not there. Raises BadInput for no directory.

    Of a directory with more than `MOST_READ` bytes only itself is looked for.
    """
    absent, files, level, seen = list[Digest](), dict[Digest, None](), [root], {root}
    while level:
        found = {each: b"" for each in level if not each.size}
        for group in groups([each for each in level if 0 < each.size <= MOST_READ], MOST_READ):
            found |= yield Read(group)
        large = [each for each in level if each.size > MOST_READ]
        gone = set((yield from _missing(large)))
        found |= {each: b"" for each in large if each not in gone}
        below: list[Digest] = []
        for each in level:
            if each not in found:
                absent.append(each)
                continue
            directory = parsed(remote_execution_pb2.Directory, found[each], "input_root")
            files.update(dict.fromkeys(_digests(directory.files)))
            new = dict.fromkeys(one for one in _digests(directory.directories) if one not in seen)
            seen.update(new)
            below += new
        if len(seen) + len(files) > MOST_NODES:
            raise BadInput("input_root", f"has more than {MOST_NODES} directories and files, so it is not looked at")
        level = below
    absent += yield from _missing(list(files))
    return absent


def missing_outputs(result: Any) -> Look:
    """Return the blobs that are not there of those which a client asks for when it gets an ActionResult.

    Files of directories count too, unless the tree of the directory has more than `MOST_READ` bytes.
    """
    wanted = [*_digests(result.output_files)]
    wanted += [
        _digest(getattr(result, field)) for field in ("stdout_digest", "stderr_digest") if result.HasField(field)
    ]
    trees = [_digest(each.tree_digest) for each in result.output_directories if each.HasField("tree_digest")]
    small = [each for each in trees if each.size <= MOST_READ]
    absent: list[Digest] = []
    for group in groups(small, MOST_READ):
        found: Mapping[Digest, bytes] = yield Read(group)
        absent += [each for each in group if each not in found]
        for data in found.values():
            tree = parsed(remote_execution_pb2.Tree, data, "tree")
            for directory in (tree.root, *tree.children):
                wanted += _digests(directory.files)
    wanted += [each for each in trees if each.size > MOST_READ]
    absent += yield from _missing(wanted)
    return absent


def groups(digests: Iterable[Digest], most: int) -> Iterator[list[Digest]]:
    """Yield the blobs in groups of at most so many bytes; a larger blob is a group of its own."""
    group: list[Digest] = []
    size = 0
    for each in digests:
        if group and size + each.size > most:
            yield group
            group, size = [], 0
        group.append(each)
        size += each.size
    if group:
        yield group


def _missing(digests: Sequence[Digest]) -> Look:
    """Ask for files. An empty one is always there."""
    wanted = list(dict.fromkeys(each for each in digests if each.size))
    absent: list[Digest] = []
    for begin in range(0, len(wanted), MOST_ASKED):
        absent += yield Find(wanted[begin : begin + MOST_ASKED])
    return absent


def _digests(nodes: Iterable[Any]) -> list[Digest]:
    return [_digest(each.digest) for each in nodes]


def _digest(message: Any) -> Digest:
    return Digest(message.hash, message.size_bytes)
