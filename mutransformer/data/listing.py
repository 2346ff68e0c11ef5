"""`mutransformer data`: which caches there are, whether they are whole, and which of them a configuration would use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mutransformer.data.cache import CacheRequest, caches, damages
from mutransformer.data.manifest import MANIFEST, PROGRESS, Manifest, differences
from mutransformer.data.reader import SourceAbsent
from mutransformer.data.storage import Folder
from mutransformer.errors import DataError

MATCH = "this configuration uses it"


def describe_caches(root: Folder, requests: Iterable[CacheRequest], *, verify: bool) -> Iterator[str]:
    """Yields lines on each cache in a folder: what it holds, damages, and why the configuration does not use it.

    Args:
        root: folder of caches.
        requests: what the configuration needs.
        verify: compare the hash of every file; else sizes alone.
    Raises:
        DataError: after the last line, when a cache is damaged.
    """
    wanted = [_settings(request) for request in requests]
    folders, n_damaged = list(caches(root)), 0
    yield f"{_count(len(folders), 'cache')} in {root}"
    for folder in folders:
        try:
            manifest = Manifest.load(folder, MANIFEST)
            whole = manifest is not None
            manifest = manifest or Manifest.load(folder, PROGRESS)
            assert manifest is not None
            found = list(damages(folder, manifest, by_hash=verify))
        except DataError as error:
            n_damaged += 1
            yield f"\n{folder}\n  {error}"
            continue
        yield f"\n{folder}"
        state = "complete" if whole else "unfinished: the command that began it goes on from here"
        yield f"  {state}{', every hash is right' if verify and not found else ''}"
        for split in manifest.splits:
            n_documents, n_tokens = manifest.total("n_documents", split), manifest.total("n_tokens", split)
            n_shards = len(manifest.splits[split])
            yield f"  {split}: {_count(n_documents, 'document')}, {n_tokens:,} tokens, {_count(n_shards, 'shard')}"
        yield from (f"  {damage}" for damage in found)
        n_damaged += bool(found)
        yield f"  {_verdict(manifest, wanted)}"
    if n_damaged:
        raise DataError(f"{n_damaged} of {len(folders)} caches are damaged; delete them to have them written again")


def _settings(request: CacheRequest) -> dict:
    """What the configuration asks for; without the state of a source that cannot be reached from here."""
    try:
        return request.settings(request.reading.reader().state_of_source())
    except SourceAbsent:
        return request.settings({})


def _verdict(manifest: Manifest, wanted: list[dict]) -> str:
    """Whether the configuration uses this cache; else the settings in which it differs least."""
    reasons = [differences(settings, manifest.settings) for settings in wanted]
    fewest = min(reasons, key=len)
    if not fewest:
        return MATCH
    shown = ", ".join(
        f"{field} is {_short(theirs)} here and {_short(ours)} there" for field, (theirs, ours) in fewest.items()
    )
    return f"not used by this configuration: {shown}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
