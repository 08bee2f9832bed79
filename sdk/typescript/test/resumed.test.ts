/** What a writer with a name knows of its slots when it opens. */

import assert from "node:assert/strict";
import { test } from "node:test";
import type { Part } from "../src/topics/map.js";
import { Resumed, type Stored } from "../src/topics/resumed.js";

const SLOTS = 65_536;
const part = (number: number, low: number, high: number, parents: readonly number[] = []): Part => ({
  number, low, high, group: 0, parents, sealed: parents.length === 0,
});
const merged = part(3, 0, SLOTS, [1, 2]);

function resumed(parts: readonly Part[], stored: Readonly<Record<number, Partial<Stored>>>): Resumed {
  const states = Object.entries(stored).map(([number, each]) => [Number(number), { position: 0n, progress: 0n, inherited: new Map(), ...each }] as const);
  return new Resumed([merged], new Map(parts.map((each) => [each.number, each])), new Map(states));
}

void test("progress of a merged part is that of each parent", () => {
  const parts = [part(1, 0, SLOTS / 2), part(2, SLOTS / 2, SLOTS), merged];
  const first = resumed(parts, { 1: { position: 3n, progress: 10n }, 2: { position: 1n, progress: 4n }, 3: { progress: 10n } });
  assert.deepEqual([first.of(0), first.of(SLOTS - 1), first.progress], [10n, 4n, 4n]);
  const second = resumed(parts, { 1: { position: 3n, progress: 500n }, 2: { position: 1n, progress: 300n }, 3: { position: 2n, progress: 350n } });
  assert.deepEqual([second.of(0), second.of(SLOTS - 1), second.progress], [500n, 350n, 350n]);
  const half = resumed(parts, { 1: { position: 3n, progress: 10n } });
  assert.deepEqual([half.covers(0, SLOTS / 2), half.covers(0, SLOTS), half.progress], [true, false, 10n]);
});

void test("progress of parents that are gone is the least of theirs", () => {
  const inherited = new Map([[1, 500n], [2, 300n]]);
  assert.equal(resumed([merged], { 3: { progress: 500n, inherited } }).progress, 300n);
  assert.equal(resumed([merged], { 3: { position: 2n, progress: 350n, inherited } }).progress, 350n);
});
