"""Public reports about vLLM that this connector can express without a model: each a probe with its right value.

A lookup is judged as the scheduler tier's own cases are. Everything else that a case asks of vLLM's real classes is right, or
is a fault with its figures. Which reports there are, and which need more than this, is in ``docs/public-cases.md``. Reports of
other connectors stand here where their geometry means the same to this one.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmatrix import protocol, rig_factory
from kvmatrix.oracle import FULL, Attention, chunked, sliding
from kvmatrix.rig_factory import quiet
from kvmatrix.rig_invariants import Violation
from kvmatrix.scheduler_harness import SchedulerUnderTest, Unsupported, group_spec, kv_cache_config, run_case, vllm_config

PREFIX = "public-"
Lookup = tuple[int, Sequence[Attention], int, int]
"""Block, groups, prompt and device prefix; sizes in tokens."""
HYBRID = (FULL, chunked(64))


@dataclass
class Found:
    """What a case came to."""

    asked: int = 0
    """Things asked besides lookups."""
    faults: list[str] = field(default_factory=list)
    """What was wrong with them: a code, a colon and a sentence with its figures."""
    lookups: list[dict[str, Any]] = field(default_factory=list)
    """Answers of :func:`kvmatrix.scheduler_harness.run_case`; ``must_serve``: the ideal hit is due, whatever the arm."""

    def ask(self, fault: str) -> None:
        self.asked += 1
        if fault:
            self.faults.append(fault)

    def look_up(self, lookups: Iterable[Lookup], head_gone: bool = False, must_serve: bool = False) -> None:
        """Ask for each lookup with the whole prompt in the CPU tier, or with the blocks of the device prefix gone from it."""
        for block, groups, prompt, prefix in lookups:
            gone = range(prefix // block) if head_gone else ()
            absent = [[g, i] for g in range(len(groups)) for i in gone]
            sizes = {"chunks": [g.chunk for g in groups], "windows": [g.window for g in groups]}
            case = {"block": block, **sizes, "prompt": prompt, "prefix": prefix, "absent": absent}
            self.lookups.append(run_case(case) | {"must_serve": must_serve, "absent": len(absent)})


def raised(error: Exception) -> str:
    """What vLLM raised, as a fault.

    Raises:
        Exception: ``error`` itself, where it is not vLLM that raised: a fault of a case must not pass for one of vLLM.
    """
    where = traceback.extract_tb(error.__traceback__)[-1]
    if Path(where.filename).parent == Path(__file__).parent:
        raise error
    said = " ".join(str(error).split())[:200] or "without a word"
    return f"raised: {type(error).__name__} in {where.name}: {said}"


# --- lookups ----------------------------------------------------------------------------------------------------------


def suffix_only(found: Found) -> None:
    """#57325: a lookup that matches only the suffix behind the device's prefix loses hits.

    The device holds the head of the prompt, the CPU tier has lost it and holds the rest. Block 16. With full attention alone,
    48 tokens behind 32 are due on every arm, and beside chunk 64 so are 144 behind 64, which ends on a chunk's boundary. Inside
    a chunk, 64 tokens behind 16 and behind 144 are due where the patch promises all; elsewhere the answer must be sound.
    """
    found.look_up([(16, (FULL,), 81, 32), (16, HYBRID, 213, 64), (16, HYBRID, 81, 16), (16, HYBRID, 213, 144)], head_gone=True)


def smallest_chunk(found: Found) -> None:
    """#21694: the edge case of one query token in a chunk of its own: chunk 4, block 2, 5 tokens of KV.

    vLLM's split of a batch into chunks gives such a token the keys that its own chunk has up to it: 1 of 5, by the definition
    of the attention, and not the 4 that the report asks about. And prompts of 5 and 6 tokens are looked up on that geometry.
    """
    for keys in range(1, 13):
        found.ask(_virtual_batch_fault(keys, 4, 2))
    found.look_up((2, (FULL, chunked(4)), prompt, prefix) for prompt in (5, 6) for prefix in (0, 2, 4))


def _virtual_batch_fault(keys: int, chunk: int, block: int) -> str:
    """What is wrong with how one query token behind ``keys - 1`` others is given its keys and their first block."""
    first = chunked(chunk).first_needed_token(keys - 1)
    lengths, starts, table = _virtual_batch(keys, chunk, block)
    if (lengths, starts, table[:1]) == ([keys - first], [0, 1], [first // block]):
        return ""
    return (
        f"wrong-keys: one query token of {keys} is given {lengths} keys from block {table[:1]},"
        f" its chunk of {chunk} has {keys - first} from block {first // block}"
    )


def _virtual_batch(keys: int, chunk: int, block: int) -> tuple[list[int], list[int], list[int]]:
    """vLLM's virtual batches for one query token with ``keys`` keys in blocks 0, 1, …: key counts, query starts, blocks."""
    import torch
    from vllm.v1.attention.backends import utils

    metadata = utils.CommonAttentionMetadata
    known = {f.name for f in dataclasses.fields(metadata)}
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
    blocks = -(-keys // block)
    given: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lengths,
        "_seq_lens_cpu": lengths,  # up to vLLM 0.29.0
        "_num_computed_tokens_cpu": lengths - 1,
        "num_reqs": 1,
        "num_actual_tokens": 1,
        "max_query_len": 1,
        "max_seq_len": keys,
        "block_table_tensor": torch.arange(blocks, dtype=torch.int32)[None],
        "slot_mapping": torch.tensor([keys - 1]),
    }
    made = utils.make_local_attention_virtual_batches(
        chunk, metadata(**{name: value for name, value in given.items() if name in known}), block
    )
    local = made[0] if isinstance(made, tuple) else made
    return local.seq_lens.tolist(), local.query_start_loc.tolist(), local.block_table_tensor[0].tolist()


LLAMA4 = (*[chunked(8192)] * 3, FULL)


def llama4_groups(found: Found) -> None:
    """#51150: Llama 4's layers with an offloading connector: the engine did not start.

    8 layers, three chunked ones (8192) to one full: vLLM makes four groups of two layers. On these groups, with block 16,
    lookups without a device prefix, behind one of a whole chunk, and behind one of 4,096 tokens: a hit shorter than the chunk,
    and one that is corrupt on stock.
    """
    shapes = sorted(_groups_of([*LLAMA4, *LLAMA4]), key=str)
    wanted = sorted([("ChunkedLocalAttentionSpec", 8192, 2)] * 3 + [("FullAttentionSpec", None, 2)], key=str)
    found.ask("" if shapes == wanted else f"groups: vLLM makes {shapes} of 8 layers, {wanted} were expected")
    found.look_up((16, LLAMA4, prompt, prefix) for prompt, prefix in ((12305, 0), (12305, 8192), (8209, 4096), (12305, 4096)))


def _groups_of(layers: Sequence[Attention]) -> list[tuple[str, int | None, int]]:
    """Kind, chunk and number of layers of each group that vLLM itself makes of ``layers``."""
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # from vLLM 0.33.0 on
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    config = rig_factory.vllm_config(lazy=False)
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = "LBHNC"  # which an engine settles as it starts
    groups = get_kv_cache_groups(config, {f"layer.{i}": group_spec(16, layer) for i, layer in enumerate(layers)})
    specs = [(g.kv_cache_spec, len(g.layer_names)) for g in groups]
    return [(type(spec).__name__, getattr(spec, "attention_chunk_size", None), count) for spec, count in specs]


def at_the_boundaries(found: Found) -> None:
    """#44599, #51094: silently wrong output where the prompt ends exactly on a block's or a chunk's boundary.

    Block 16, chunk 64: prompts of 1, 4 and 8 blocks and one token less and more, with an empty device (as reported) and with a
    prefix of a whole chunk. The last token is always computed: the whole blocks before it are served, and no more.
    """
    prompts = [edge + more for edge in (16, 64, 128) for more in (-1, 0, 1)]
    found.look_up((16, HYBRID, prompt, prefix) for prompt in prompts for prefix in (0, 64) if prefix < prompt)


def unaligned_window(found: Found) -> None:
    """#48959: a valid load of a sliding window aborted, 129 blocks against 128.

    Window 4,096, block 32, 98,012 cached tokens. This connector serves whole blocks, 97,984 tokens: 128 blocks of the window's
    group, all of the full-attention group's; and what is left of them behind prefixes that end inside the window and before it.
    """
    groups = (FULL, sliding(4096))
    found.look_up(((32, groups, 98013, prefix) for prefix in (0, 32768, 93888, 93920, 97024)), must_serve=True)
    for lookup in found.lookups:
        blocks = (98012 // 32) - lookup["prefix"] // 32
        due = blocks + min(blocks, 128)
        loaded = lookup["loaded_blocks"]
        found.ask("" if loaded == due else f"loads: {loaded} blocks behind {lookup['prefix']} tokens, {due} are needed")


# --- what happens around a lookup -------------------------------------------------------------------------------------


def evicted_before_load(found: Found) -> None:
    """#39702: the lookup found 19,264 tokens, and none were left when they were to be loaded: evicted in between.

    Between the lookup and its load every CPU block that nobody holds is given to others. All that was answered is still loaded,
    each block from its own copy: a prompt of 19,265 tokens with block 64 and chunk 8192, and short ones with block 16.
    """
    for block, groups, prompt, prefix in ((64, (FULL, chunked(8192)), 19265, 0), (16, HYBRID, 81, 64), (16, (FULL,), 81, 16)):
        sut = SchedulerUnderTest(block, groups, prompt)
        sut.fill_cpu(prompt)
        request = sut.request(prompt)
        served, fault = sut.checked_lookup(request, prefix)
        due = (prompt - 1) // block * block - prefix
        if not fault and served != due:
            fault = f"lost-reuse: {served} of {due} tokens are answered"
        others = sut.cpu_pool.get_new_blocks(sut.cpu_pool.get_num_free_blocks())
        sut.cpu_pool.free_blocks(others)
        taken = {b.block_id for b in others}
        place = f"of {served} tokens behind {prefix}, block {block}, groups {', '.join(map(str, groups))}"
        found.ask(fault and f"{fault}, {place}")
        if not fault:
            found.ask(_load_fault(sut, request, prefix, served, taken, place))


def _load_fault(sut: SchedulerUnderTest, request: Any, prefix: int, served: int, taken: set[int], place: str) -> str:
    """What is wrong with a load after the CPU blocks ``taken`` were given to others."""
    try:
        done = sut.load(request, prefix, served)
    except Exception as e:
        return f"{raised(e)}, at the load {place}"
    if done.fault:
        return f"{done.fault}, {place}"
    first = prefix // sut.block
    pairs = [
        (loaded, own)
        for flags, kept in zip(done.loaded, sut.stored, strict=True)
        for loaded, own in zip(flags, kept[first:], strict=False)
    ]
    if gone := sum(loaded and own.block_id in taken for loaded, own in pairs):
        return f"evicted: {gone} blocks were given to others before their load, {place}"
    if not all(done.loaded[g][i] for g, a in enumerate(sut.groups) if a == FULL for i in range(served // sut.block)):
        return f"evicted: {sum(map(sum, done.loaded))} blocks are loaded, {place}"
    return sut.left_behind()


def inside_a_block(found: Found) -> None:
    """#28950: the device's hit ends inside a block of the CPU tier: an assertion on the way.

    Block 256, a hash for every 16 tokens, full attention beside chunk 512: behind 16, 128, 240, 272 and 752 tokens nothing is
    served, for transfers are whole blocks, and nothing is pinned; behind 256 and 512 tokens the rest is served as before.
    """
    if not protocol.release_has("num_computed_tokens % self.block_size"):
        raise Unsupported("refused: this release's scheduler asks about whole blocks only, and its lookup knows nothing else")
    sut = SchedulerUnderTest(256, [FULL, chunked(512)], 1025, hash_block=16)
    sut.fill_cpu(1025)
    for prefix in (16, 128, 240, 272, 752):
        request = sut.request(1025)
        answer = sut.ask(request, prefix)
        sut.drop_hit(request)
        found.ask("" if answer == (0, False) else f"contract: answers {answer} behind {prefix} tokens, inside a block of 256")
        found.ask(sut.left_behind())
    found.look_up([(256, (FULL, chunked(512)), 1025, 512), (256, (FULL,), 1025, 256)])


def skips_the_cache(found: Found) -> None:
    """#44585: the lookup ignored that a request must not read the cache: wrong prompt logprobs.

    Block 16, chunk 64, the whole prompt of 81 tokens in the CPU tier: a request with ``prompt_logprobs`` 1 or 0, or with
    ``skip_reading_prefix_cache``, is served nothing behind 0 and 64 tokens; one without is served 80 and 16.
    """
    for sampling in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}, {}):
        for prefix, due in ((0, 80), (64, 16)):
            sut = SchedulerUnderTest(16, HYBRID, 81)
            sut.fill_cpu(81)
            request = sut.request(81, **sampling)
            served, fault = sut.checked_lookup(request, prefix)
            wanted = 0 if sampling else due
            if served != wanted:
                fault = fault or f"reads-cache: {served} tokens behind {prefix} for a request with {sampling}, {wanted} are due"
            found.ask(fault)


def block_below_hash(found: Found) -> None:
    """#56396: groups of block 32 and 8 with a hash for every 32 tokens: an assertion without a word at the first request.

    Such a configuration is refused as the scheduler is made, with a reason, or it is right: requests can be asked about.
    """
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    config, page = kv_cache_config(32, [FULL, sliding(64)], 100)
    small = dataclasses.replace(config.kv_cache_groups[1], kv_cache_spec=group_spec(8, sliding(64)))
    config = dataclasses.replace(config, kv_cache_groups=[config.kv_cache_groups[0], small])
    sizes = {"scheduler_block_size": 32, "hash_block_size": 32}
    try:
        scheduler = SimpleCPUOffloadScheduler(vllm_config(200, 32), config, cpu_capacity_bytes=page * 200, **sizes)
    except (AssertionError, ValueError) as e:
        if not str(e):
            found.ask(raised(e))
            return
        raise Unsupported(f"refused: {type(e).__name__}: {' '.join(str(e).split())}") from e
    except TypeError as e:
        raise Unsupported(f"refused: this release has no hash size of its own: {e}") from e
    request = SchedulerUnderTest(32, [FULL], 97).request(97)
    try:
        answer = scheduler.get_num_new_matched_tokens(request, 0)
    except Exception as e:
        found.ask(raised(e))
        return
    found.ask("" if answer == (0, False) else f"contract: answers {answer} from an empty CPU tier")


# --- the probes -------------------------------------------------------------------------------------------------------

Case = Callable[[Found], None]


def cases() -> dict[str, Case]:
    """Name of each probe -> what it asks."""
    from kvmatrix import public_programs as programs

    named: dict[str, Case] = {
        "57325-suffix-only": suffix_only,
        "39702-evicted-before-load": evicted_before_load,
        "28950-inside-a-block": inside_a_block,
        "21694-smallest-chunk": smallest_chunk,
        "51150-llama4-groups": llama4_groups,
        "48959-unaligned-window": unaligned_window,
        "44599-at-the-boundaries": at_the_boundaries,
        "42085-second-long-prompt": programs.second_long_prompt,
        "42571-double-free": programs.double_free,
        "56396-block-below-hash": block_below_hash,
        "44585-skips-the-cache": skips_the_cache,
        "57727-reset": programs.reset,
        "57727-reset-with-connector": programs.reset_with_connector,
        "45704-store-order": programs.store_order,
    }
    return {PREFIX + name: case for name, case in named.items()}


def run(name: str) -> dict[str, Any]:
    """Ask one of :func:`cases`: the fields of ``Found``.

    Raises:
        KeyError: there is no such case.
        Unsupported: this release cannot be asked it; the message is the release's reason.
    """
    found, case = Found(), cases()[name]
    with quiet():
        try:
            case(found)
        except Unsupported:
            raise
        except ImportError as e:
            raise Unsupported(f"refused: this release has it elsewhere, or not at all: {e}") from e
        except Violation as violation:
            found.ask(str(violation))
        except Exception as e:
            found.ask(raised(e))
    return dataclasses.asdict(found)
