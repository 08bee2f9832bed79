/** The way to the leader of a group: which address is next, and when. Source: docs/topics.md, "Writing". */

import { Backoff } from "../rpc/backoff.js";

/** Times in a row that a named leader is followed at once; then the back-off counts, too. */
const MAX_FOLLOWED = 3;

/** The leader that a refusal names is next, at once; else the next replica after a back-off. */
export class LeaderLink {
  /** Time before which nothing is tried. */
  restUntil = 0;
  readonly #backoff: Backoff;
  #addresses: readonly string[] = [];
  #leader = "";
  #next = 0;
  #followed = 0;

  constructor(firstMs: number, maxMs: number) {
    this.#backoff = new Backoff(firstMs, maxMs);
  }

  /** Set the group's addresses, the leader first if it is known. None change nothing. */
  setAddresses(addresses: readonly string[]): void {
    if (addresses.length > 0 && addresses.join() !== this.#addresses.join()) {
      this.#addresses = addresses;
      this.#next = 0;
    }
  }

  /** The address to try; empty: none is known. */
  address(): string {
    return this.#leader || (this.#addresses[this.#next % this.#addresses.length] ?? "");
  }

  /** The address leads. */
  answered(): void {
    this.#backoff.reset();
    this.#followed = 0;
  }

  /** The address does not lead, or did not answer. `leader`: the address that it named. */
  failed(now: number, leader = "", retryAfterMs = 0): void {
    if (leader && leader !== this.address() && this.#followed < MAX_FOLLOWED) {
      this.#followed += 1;
      this.#leader = leader;
      this.restUntil = now + retryAfterMs;
      return;
    }
    if (!this.#leader) {
      this.#next += 1;
    }
    this.#leader = "";
    this.#followed = 0;
    this.restUntil = now + Math.max(this.#backoff.next(), retryAfterMs);
  }
}
