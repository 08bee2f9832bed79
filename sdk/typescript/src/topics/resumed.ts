/**
 * Progress that a writer with a name had made when it opened, for each slot.
 *
 * The application's progress rises with every message, and a part keeps the highest one up to which it has all of the writer's messages for
 * its slots. For a slot, the highest of its part and of those before it counts: of two parts that were merged, one may have had more than
 * the writer has sent to their child so far.
 *
 * Source: docs/sdk.md, "Durable topics".
 */

import type { Part } from "./map.js";

/** State of a writer in a part. */
export interface Stored {
  /** Of its last message; 0n: none. */
  readonly position: bigint;
  /** After that; without a message the highest one in the parts before it. */
  readonly progress: bigint;
  /** Progress in the parts before it, of all generations. */
  readonly inherited: ReadonlyMap<number, bigint>;
}

const NONE: Stored = { position: 0n, progress: 0n, inherited: new Map() };

const most = (numbers: readonly bigint[]): bigint => numbers.reduce((a, b) => (a > b ? a : b), 0n);

/** The progress that a part left, or those before it. */
function leftBy(stored: Stored, part: number): bigint {
  return stored.inherited.get(part) ?? most([...stored.inherited].filter(([number]) => number < part).map(([, progress]) => progress));
}

/** From this slot on everything up to `progress` is stored. */
interface From {
  readonly low: number;
  readonly progress: bigint;
}

/** Progress by slots. */
export class Resumed {
  readonly #ranges: readonly From[];

  /** `open`: the parts that take writes, by their slots; `stored`: by part. */
  constructor(
    open: readonly Part[],
    private readonly parts: ReadonlyMap<number, Part>,
    private readonly stored: ReadonlyMap<number, Stored>,
  ) {
    this.#ranges = open.flatMap((part) => this.#within(part, part.low, part.high));
  }

  /** The state of the writer in a part. */
  in(part: number): Stored {
    return this.stored.get(part) ?? NONE;
  }

  #within(part: Part, low: number, high: number): From[] {
    const own = this.in(part.number);
    const least = own.position > 0n ? own.progress : 0n;
    const known = part.parents.flatMap((parent) => this.parts.get(parent) ?? []).filter((each) => each.low < high && each.high > low);
    // Which slots a parent had that is gone is not known: of several, the least counts.
    const gone = part.parents.filter((parent) => !this.parts.has(parent)).map((parent) => leftBy(own, parent));
    const rest = most([least, gone.reduce((a, b) => (a < b ? a : b), gone[0] ?? 0n)]);
    const found: From[] = [];
    let at = low;
    for (const before of known.sort((a, b) => a.low - b.low)) {
      if (before.low > at) {
        found.push({ low: at, progress: rest });
      }
      const ranges = this.#within(before, Math.max(before.low, low), Math.min(before.high, high));
      found.push(...ranges.map((each) => ({ low: each.low, progress: most([each.progress, least]) })));
      at = Math.min(before.high, high);
    }
    return at < high ? [...found, { low: at, progress: rest }] : found;
  }

  /** The progress up to which everything for a slot is stored; 0n: nothing is known to be. */
  of(slot: number): bigint {
    return this.#ranges.findLast((each) => each.low <= slot)?.progress ?? 0n;
  }

  /** The progress after which to go on: everything up to it is stored. 0n: begin with the first. */
  get progress(): bigint {
    const known = this.#ranges.map((each) => each.progress).filter((each) => each > 0n);
    return known.reduce((a, b) => (a < b ? a : b), known[0] ?? 0n);
  }

  /** True if something is known to be stored for each of the slots [low, high). */
  covers(low: number, high: number): boolean {
    return this.#ranges.every((each, number) => {
      const end = this.#ranges[number + 1]?.low ?? Infinity;
      return each.low >= high || end <= low || each.progress > 0n;
    });
  }
}
