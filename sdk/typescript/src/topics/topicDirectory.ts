/** Where the parts of topics are: asked of proxies, kept for topics in use, and asked again when it has changed; and calls of leaders. */

import type { DescMessage, DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { status as Status } from "@grpc/grpc-js";
import { Topics, type TopicChangeSchema, type TopicRefusal } from "../gen/pixiu/wire/v1/topic_pb.js";
import {
  Draining, NotAllowed, NotAuthenticated, NotConnected, NotLeader, NotServed, OutcomeUnknown, Overloaded, PixiuError, StaleWriter, TooFewInSync,
  Unavailable, UnknownTopic,
} from "../errors.js";
import type { ClientOptions } from "../options.js";
import { Backoff } from "../rpc/backoff.js";
import { CallError, type Channels } from "../rpc/channels.js";
import { Changes, now, sleep } from "../rpc/waiting.js";
import { LeaderLink } from "./leaderLink.js";
import { errorOfCall, refused, TopicMap } from "./map.js";

const ASK_MS = 5_000;
/** Time for a change to be in effect. */
const CHANGE_MS = 60_000;
const MAX_TRIES = 8;
/** Interval at which a topic that somebody uses is asked for. */
const FOLLOW_MS = 5_000;
/** Time limit for finding a leader: a change of leaders takes about ten seconds. */
const LEADER_MS = 20_000;
const LEADER = "pixiu-leader";

/** Somebody who uses a topic. */
export interface Follower {
  readonly onTopic: (topic: TopicMap) => void;
  /** The topic is gone, or may not be seen any more. */
  readonly onEnd: (error: PixiuError) => void;
}

interface Followed {
  topic: TopicMap;
  readonly followers: Set<Follower>;
  readonly wanted: Changes;
  readonly ending: AbortController;
  hurry: boolean;
  newer: boolean;
}

/** Asks the proxies for topics, and leaders for their parts. */
export class TopicDirectory {
  readonly #followed = new Map<string, Followed>();
  readonly #ending = new AbortController();
  readonly #keeping = new Set<Promise<void>>();
  #turn = Math.floor(Math.random() * 1_000_000);

  constructor(
    readonly channels: Channels,
    readonly options: ClientOptions,
    private readonly proxies: () => readonly string[],
  ) {}

  /**
   * Ask one proxy after the other until one answers. `changes`: a call that one did not answer may be in effect, and is not made again.
   * Rejects with the error of a refusal, `Unavailable` if none answers, `OutcomeUnknown`.
   */
  async ask<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    name: string,
    { timeoutMs = ASK_MS, changes = false, signal }: { timeoutMs?: number; changes?: boolean; signal?: AbortSignal | undefined } = {},
  ): Promise<MessageShape<O>> {
    const deadline = now() + Math.max(timeoutMs, this.options.connectTimeoutMs);
    const backoff = new Backoff(this.options.backoffMs, this.options.maxBackoffMs);
    for (;;) {
      let last: PixiuError = new Unavailable("the cluster has no proxy");
      const known = this.proxies();
      this.#turn += 1;
      const begin = this.#turn % Math.max(1, known.length);
      for (const address of [...known.slice(begin), ...known.slice(0, begin)].slice(0, MAX_TRIES)) {
        try {
          return await this.channels.unary(address, method, request, Math.max(100, Math.min(timeoutMs, deadline - now())), this.#signal(signal));
        } catch (failure) {
          if (!(failure instanceof CallError)) {
            throw failure;
          }
          const { error, final } = errorOfCall(failure, name);
          if (final || (changes && error instanceof OutcomeUnknown)) {
            throw error;
          }
          last = error;
        }
      }
      const wait = backoff.next();
      if (last instanceof NotServed || now() + wait >= deadline) {
        throw last;
      }
      await sleep(wait, this.#signal(signal));
      this.#signal(signal).throwIfAborted();
    }
  }

  #signal(signal: AbortSignal | undefined): AbortSignal {
    return signal ? AbortSignal.any([signal, this.#ending.signal]) : this.#ending.signal;
  }

  /** Ask for a topic. `newerThan`: a version, than which a proxy waits a moment for a newer one. */
  async describe(name: string, newerThan = 0n, signal?: AbortSignal): Promise<TopicMap> {
    return this.#learn(new TopicMap(await this.ask(Topics.method.describe, { name, newerThan }, name, { signal })));
  }

  /** A topic as described last; it is asked for if nobody follows it. */
  async topic(name: string): Promise<TopicMap> {
    return this.#followed.get(name)?.topic ?? this.describe(name);
  }

  /** Ask for a change, and wait until it is in effect. */
  async change(change: MessageInitShape<typeof TopicChangeSchema> & { name: string }, signal?: AbortSignal): Promise<TopicMap> {
    return this.#learn(new TopicMap(await this.ask(Topics.method.change, change, change.name, { timeoutMs: CHANGE_MS, changes: true, signal })));
  }

  #learn(topic: TopicMap): TopicMap {
    const followed = this.#followed.get(topic.name);
    if (followed && topic.version >= followed.topic.version) {
      if (topic.groups.size === 0) {
        this.refresh(topic.name); // it came without them, as an answer to a change
      } else {
        followed.topic = topic;
        for (const follower of [...followed.followers]) {
          follower.onTopic(topic);
        }
      }
    }
    return topic;
  }

  /** Describe a topic, this version of it or a newer one, and from now on report each newer one. `leave` ends it. */
  async follow(name: string, follower: Follower, version = 0n, signal?: AbortSignal): Promise<TopicMap> {
    const topic = await this.describe(name, version > 0n ? version - 1n : 0n, signal);
    this.#ending.signal.throwIfAborted();
    let followed = this.#followed.get(name);
    if (!followed) {
      followed = { topic, followers: new Set(), wanted: new Changes(), ending: new AbortController(), hurry: false, newer: false };
      this.#followed.set(name, followed);
      const keeping = this.#keep(name, followed).finally(() => this.#keeping.delete(keeping));
      this.#keeping.add(keeping);
    }
    followed.followers.add(follower);
    return followed.topic;
  }

  /** End what `follow` began. */
  leave(name: string, follower: Follower): void {
    const followed = this.#followed.get(name);
    if (followed?.followers.delete(follower) === true && followed.followers.size === 0) {
      this.#followed.delete(name);
      followed.ending.abort();
      followed.wanted.notify();
    }
  }

  /** Ask again soon. `newer`: for a newer version, which a proxy waits for a moment. */
  refresh(name: string, newer = false): void {
    const followed = this.#followed.get(name);
    if (followed) {
      followed.newer ||= newer;
      followed.hurry = true;
      followed.wanted.notify();
    }
  }

  async #keep(name: string, followed: Followed): Promise<void> {
    const backoff = new Backoff(this.options.backoffMs, this.options.maxBackoffMs);
    const { signal } = followed.ending;
    while (!signal.aborted) {
      if (!followed.hurry) {
        await followed.wanted.waitAtMost(FOLLOW_MS * (0.75 + 0.5 * Math.random()));
      }
      const { hurry, newer } = followed;
      const known = followed.topic.version;
      followed.hurry = followed.newer = false;
      if (signal.aborted) {
        return;
      }
      try {
        await this.describe(name, newer ? known : 0n, signal);
        backoff.reset();
        if (hurry && followed.topic.version === known) {
          await sleep(this.options.backoffMs * Math.random(), signal); // many ask at once
        }
      } catch (error) {
        if (signal.aborted || this.#ending.signal.aborted) {
          return;
        }
        if ([UnknownTopic, NotAllowed, NotAuthenticated, NotServed].some((kind) => error instanceof kind)) {
          this.#followed.delete(name);
          for (const follower of [...followed.followers]) {
            follower.onEnd(error as PixiuError);
          }
          return;
        }
        await sleep(backoff.next(), signal);
      }
    }
  }

  /**
   * Call a method of the leader of a group, and look for it meanwhile. Rejects with the refusal of a leader, and `Unavailable` if none
   * answers within `limitMs`.
   */
  async askLeader<I extends DescMessage, O extends DescMessage>(
    topic: string,
    group: number,
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    { callMs = 5_000, limitMs = LEADER_MS, signal }: { callMs?: number; limitMs?: number; signal?: AbortSignal | undefined } = {},
  ): Promise<MessageShape<O>> {
    const deadline = now() + limitMs;
    const link = new LeaderLink(this.options.backoffMs, Math.min(this.options.maxBackoffMs, 1_000));
    let why: PixiuError = new Unavailable(`no replica of topic group ${group} is known`);
    for (;;) {
      link.setAddresses((await this.topic(topic)).groups.get(group) ?? []);
      const address = link.address();
      if (address) {
        try {
          const reply = await this.channels.unary(address, method, request, callMs, this.#signal(signal));
          const refusal = (reply as { refusal?: TopicRefusal }).refusal;
          if (!refusal?.code) {
            return reply;
          }
          why = refused(refusal, topic);
        } catch (failure) {
          if (!(failure instanceof CallError)) {
            throw failure;
          }
          why = leaderError(failure, topic);
        }
        if (![NotLeader, Unavailable, Draining, Overloaded, TooFewInSync].some((kind) => why instanceof kind)) {
          throw why;
        }
      }
      link.failed(now(), why instanceof NotLeader ? why.leader : "", why.retryAfterMs);
      if (link.restUntil > deadline || now() >= deadline) {
        throw new Unavailable(`no leader of topic group ${group} answers: ${address || "none is known"}: ${why.message}`);
      }
      this.refresh(topic);
      await sleep(Math.max(0, link.restUntil - now()), this.#signal(signal));
      this.#signal(signal).throwIfAborted();
    }
  }

  /** Ask no more. */
  async close(): Promise<void> {
    this.#ending.abort(new NotConnected("the client is closed: connect again"));
    for (const followed of this.#followed.values()) {
      followed.ending.abort();
      followed.wanted.notify();
    }
    this.#followed.clear();
    await Promise.all(this.#keeping);
  }
}

/** The error of a call of a leader. A replica that does not lead answers with FAILED_PRECONDITION. */
function leaderError(failure: CallError, topic: string): PixiuError {
  const { status, metadata, reason } = failure.end;
  if (status === Status.FAILED_PRECONDITION) {
    const error = new NotLeader(reason);
    error.leader = String(metadata?.get(LEADER)[0] ?? "");
    return error;
  }
  const stale = /^ABORTED: STALE_WRITER: (.*)$/s.exec(reason)?.[1];
  if (stale !== undefined) {
    return new StaleWriter(stale);
  }
  return status === Status.RESOURCE_EXHAUSTED ? new Overloaded(reason, 200) : errorOfCall(failure, topic).error;
}
