/** Making and changing durable topics and their channels. Source: docs/sdk.md, "Durable topics". */

import type { MessageInitShape } from "@bufbuild/protobuf";
import { TopicLog, Topics, type ChannelReply, type ChannelRequestSchema, type TopicSettingsSchema } from "../gen/pixiu/wire/v1/topic_pb.js";
import { InvalidArgument } from "../errors.js";
import { spans, TopicMessage } from "../wire/block.js";
import { checkName, TopicMap, type ChannelInfo, type Part, type TopicSettingsInfo } from "./map.js";
import type { ReaderPosition } from "./reader.js";
import type { TopicDirectory } from "./topicDirectory.js";

/** A topic. */
export interface TopicInfo {
  readonly name: string;
  readonly id: number;
  readonly version: bigint;
  /** Parts by number, sealed ones included. */
  readonly parts: readonly Part[];
  readonly channels: ReadonlyMap<string, ChannelInfo>;
  readonly settings: TopicSettingsInfo;
  readonly deleted: boolean;
}

/** Settings of a topic; what is left out is not set. */
export type TopicSettings = Partial<TopicSettingsInfo>;

/** A message of a channel whose attempts are used up, or that was rejected. */
export interface DeadMessage {
  readonly part: number;
  readonly offset: number;
  readonly attempts: number;
  readonly reason: string;
  /** undefined: it can no longer be read. */
  readonly message: TopicMessage | undefined;
}

/** State of a channel in one part. */
export interface ChannelPartInfo {
  readonly channel: string;
  readonly part: number;
  /** Everything below is acknowledged. */
  readonly floor: number;
  readonly end: number;
  readonly unacknowledged: number;
  readonly withMembers: number;
  /** Messages that wait for another delivery. */
  readonly waiting: number;
  readonly dead: number;
  readonly members: readonly string[];
  /** Why messages wait, in words. */
  readonly stuck: readonly string[];
}

/** Options of a channel. */
export interface ChannelSettings {
  readonly ordered?: boolean;
  readonly fromEnd?: boolean;
  readonly maxAttempts?: number;
  readonly timeoutMs?: number;
  readonly filter?: string;
}

const infoOf = (topic: TopicMap): TopicInfo => ({
  name: topic.name, id: topic.id, version: topic.version, parts: [...topic.parts.values()], channels: topic.channels,
  settings: topic.settings, deleted: topic.deleted,
});

function settingsOf(given: TopicSettings): MessageInitShape<typeof TopicSettingsSchema> {
  const number = (name: keyof TopicSettings): bigint => {
    const value = given[name] ?? 0;
    if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 0) {
      throw new InvalidArgument(`${name} is a whole number, 0 for no limit, not ${String(value)}`);
    }
    return BigInt(value);
  };
  return {
    retentionS: number("retentionS"), retentionBytes: number("retentionBytes"), messagesPerS: number("messagesPerS"),
    bytesPerS: number("bytesPerS"), readMessagesPerS: number("readMessagesPerS"), readBytesPerS: number("readBytesPerS"),
    compact: number("compactS"), retainAcknowledged: given.retainAcknowledged ?? false, store: given.store ?? "",
  };
}

/** Durable topics of the cluster: `client.topics`. */
export class TopicAdmin {
  /** Made by the client. */
  constructor(private readonly directory: TopicDirectory) {}

  /** Create a topic. `parts`: parallel logs; default: one for each group. Rejects with `TopicExists`, unless `ifMissing`. */
  async create(name: string, given: TopicSettings & { readonly parts?: number; readonly ifMissing?: boolean } = {}): Promise<TopicInfo> {
    const { parts = 0, ifMissing = false, ...settings } = given;
    const change = { case: "create" as const, value: { parts, ifMissing, settings: settingsOf(settings) } };
    return infoOf(await this.directory.change({ name: checkName(name), change }));
  }

  /** Set all settings of a topic; those that are left out are not set any more. */
  async alter(name: string, settings: TopicSettings): Promise<TopicInfo> {
    return infoOf(await this.directory.change({ name: checkName(name), change: { case: "alter", value: settingsOf(settings) } }));
  }

  /** Describe a topic. Rejects with `UnknownTopic`. */
  async describe(name: string): Promise<TopicInfo> {
    return infoOf(await this.directory.describe(checkName(name)));
  }

  /** Topics whose names begin with a prefix, in the order of names. `deleted`: those in the bin, too. */
  async list(prefix = "", { deleted = false }: { deleted?: boolean } = {}): Promise<TopicInfo[]> {
    const found: TopicInfo[] = [];
    for (;;) {
      const reply = await this.directory.ask(Topics.method.list, { prefix, after: found.at(-1)?.name ?? "", deleted }, "");
      found.push(...reply.topics.map((topic) => infoOf(new TopicMap(topic))));
      if (!reply.more || reply.topics.length === 0) {
        return found;
      }
    }
  }

  /** Delete a topic: `restore` brings it back within 24 hours. `force`: although channels have members; `now`: without the bin. */
  async delete(name: string, { force = false, now = false }: { force?: boolean; now?: boolean } = {}): Promise<TopicInfo> {
    return infoOf(await this.directory.change({ name: checkName(name), change: { case: "delete", value: { force, now } } }));
  }

  /** Bring a deleted topic back. */
  async restore(name: string): Promise<TopicInfo> {
    return infoOf(await this.directory.change({ name: checkName(name), change: { case: "restore", value: {} } }));
  }

  /** Seal parts and open others for their slots. `bounds`: first slots of the new parts after the first one; `groups`: of the new parts. */
  async resize(name: string, parts: readonly number[], { bounds = [], groups = [] }: { bounds?: readonly number[]; groups?: readonly number[] } = {}): Promise<TopicInfo> {
    const value = { parts: [...parts], bounds: [...bounds], groups: [...groups] };
    return infoOf(await this.directory.change({ name: checkName(name), change: { case: "resize", value } }));
  }

  /** Create a channel, or change attempts, time-out and filter of one that is there. */
  async setChannel(name: string, channel: string, given: ChannelSettings = {}): Promise<TopicInfo> {
    const { ordered = false, fromEnd = false, maxAttempts = 0, timeoutMs = 0, filter = "" } = given;
    const value = { name: checkName(channel, "channel"), ordered, fromEnd, maxAttempts, timeoutMs: Math.ceil(timeoutMs), filter };
    return infoOf(await this.directory.change({ name: checkName(name), change: { case: "setChannel", value } }));
  }

  /** Remove a channel with everything that it knows. */
  async removeChannel(name: string, channel: string): Promise<TopicInfo> {
    const value = checkName(channel, "channel");
    return infoOf(await this.directory.change({ name: checkName(name), change: { case: "removeChannel", value } }));
  }

  /** State of a channel, or of all, in each part. */
  async channelState(name: string, channel = ""): Promise<ChannelPartInfo[]> {
    const replies = await this.#ask(name, { channel, ask: { case: "state", value: true } });
    return replies
      .flatMap((reply) => reply.parts)
      .map((each) => ({
        channel: each.channel, part: each.part, floor: Number(each.floor), end: Number(each.end), unacknowledged: Number(each.unacknowledged),
        withMembers: Number(each.withMembers), waiting: Number(each.waiting), dead: Number(each.dead),
        members: each.members.map((member) => member.name), stuck: each.stuck,
      }))
      .sort((a, b) => (a.channel < b.channel ? -1 : a.channel > b.channel ? 1 : a.part - b.part));
  }

  /** Dead letters of a channel, at most `limit` of each group. */
  async deadLetters(name: string, channel: string, limit = 100): Promise<DeadMessage[]> {
    const replies = await this.#ask(name, { channel, ask: { case: "dead", value: { limit } } });
    return replies
      .flatMap((reply) => reply.dead)
      .map((each): DeadMessage => {
        const sent = each.message;
        const offset = Number(sent?.base ?? 0);
        let message: TopicMessage | undefined;
        if (sent && sent.index.length > 0) {
          const data = Buffer.from(sent.data);
          const origin = { topic: name, part: each.part, timeUs: Number(sent.timeUs), sender: sent.sender, writer: sent.writer };
          const [span] = spans(Buffer.from(sent.index), data);
          message = span && new TopicMessage(origin, offset, data, span.at, span.end, span.slot, span.flags);
        }
        return { part: each.part, offset, attempts: each.attempts, reason: each.reason, message };
      })
      .sort((a, b) => a.part - b.part || a.offset - b.offset);
  }

  /** Deliver dead letters again, with new attempts; default: all. Resolves to their number. */
  async resend(name: string, channel: string, letters?: readonly DeadMessage[]): Promise<number> {
    const byPart = new Map<number, bigint[]>();
    for (const each of letters ?? []) {
      byPart.set(each.part, [...(byPart.get(each.part) ?? []), BigInt(each.offset)]);
    }
    let changed = 0;
    for (const [part, offsets] of letters ? byPart : [[undefined, [] as bigint[]] as const]) {
      const parts = part === undefined ? [] : [part];
      for (const reply of await this.#ask(name, { channel, parts, ask: { case: "resend", value: { offsets } } })) {
        changed += Number(reply.changed);
      }
    }
    return changed;
  }

  /**
   * Move a channel to the start or end of what is kept, to a time, or in each part to an offset. `force`: although it has members.
   * Resolves to the number of messages that are to be delivered again or are skipped.
   */
  async seek(name: string, channel: string, to: "start" | "end" | Date | ReaderPosition, { force = false }: { force?: boolean } = {}): Promise<number> {
    interface Seek {
      parts: number[];
      to: { case: "start" | "end"; value: true } | { case: "timeUs" | "offset"; value: bigint };
    }
    const seeks: Seek[] =
      to === "start" || to === "end"
        ? [{ parts: [], to: { case: to, value: true } }]
        : to instanceof Date
          ? [{ parts: [], to: { case: "timeUs", value: BigInt(to.getTime()) * 1000n } }]
          : Object.entries(to).map(([part, offset]) => ({ parts: [Number(part)], to: { case: "offset", value: BigInt(offset) } }));
    let changed = 0;
    for (const seek of seeks) {
      for (const reply of await this.#ask(name, { channel, parts: seek.parts, ask: { case: "seek", value: { to: seek.to, force } } })) {
        changed += Number(reply.changed);
      }
    }
    await this.#ask(name, { channel, ask: { case: "rejoin", value: true } });
    return changed;
  }

  /** Ask the leaders of all groups, or of those that hold the request's parts. */
  async #ask(name: string, request: MessageInitShape<typeof ChannelRequestSchema> & { parts?: number[] }): Promise<ChannelReply[]> {
    const topic = await this.directory.describe(checkName(name));
    const parts = request.parts ?? [];
    const wanted = [...topic.parts.values()].filter((part) => parts.length === 0 || parts.includes(part.number));
    const groups = [...new Set(wanted.map((part) => part.group))];
    if (groups.length === 0) {
      throw new InvalidArgument(`the topic ${name} has no parts ${parts.join(", ")}`);
    }
    return Promise.all(groups.map((group) => this.directory.askLeader(name, group, TopicLog.method.channel, { ...request, topic: name })));
  }
}
