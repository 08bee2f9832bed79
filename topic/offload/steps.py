"""Steps of a plan at the store. Blocking: to be called in threads.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from cluster.topics.entries import number_of, topic_of
from pixiu.errors import Unavailable
from pixiu.objects.manifest import Manifest, folder_of
from pixiu.objects.store import ObjectExists, ObjectStore
from topic.offload.plan import Remove, orphans


def write_manifest(store: ObjectStore, manifest: Manifest, before: Manifest | None, kept: Collection[str]) -> bool:
    """Write a manifest; then remove the one before it, or, if that is not known, what former leaders and failures left.

    kept: the names of objects that count. Returns whether all of that is removed. Raises Unavailable; ObjectExists if another
    process wrote one of this name."""
    data, folder = manifest.encode(), folder_of(manifest.topic, manifest.part)
    try:
        store.create(manifest.name, data)
    except ObjectExists:
        if store.read(manifest.name) != data:  # else an attempt of this leader, of which the answer was lost
            raise
    try:
        store.remove([before.name] if before is not None else orphans(store.names(folder), manifest, kept))
    except Unavailable:  # the next manifest comes soon enough
        return False
    return True


def remove(store_at: Callable[[str], ObjectStore], part: int, action: Remove) -> None:
    """Remove objects of a part. Raises Unavailable."""
    folder = folder_of(topic_of(part), number_of(part))
    for url in sorted({each.url for each in action.objects}):
        store = store_at(url)
        named = [each.name(folder) for each in action.objects if each.url == url]
        store.remove(store.names(folder) if action.whole else named)
