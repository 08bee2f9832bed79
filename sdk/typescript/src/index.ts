/** The SDK for Node: `import { connect } from "@pixiu/client"`. Source: docs/sdk_typescript.md. */

export * from "./errors.js";
export { connect, Client, Destination, Room, User, Writer } from "./client.js";
export type { ConnectOptions, MailOptions, SendOptions, UserPresence } from "./client.js";
export type { ClusterMap } from "./directory.js";
export type { Id } from "./ids.js";
export type { ClientOptions } from "./options.js";
export type { TlsOptions, Token } from "./rpc/channels.js";
export type { CallOptions } from "./rpc/waiting.js";
export { MailReceipt, Receipt, SignalReceipt } from "./send/receipt.js";
export type { ConnectionEvent, ConnectionState } from "./receive/gatewayConnection.js";
export { Inbox, Mail, type InboxOptions } from "./receive/inbox.js";
export type { GapReason, MailCounters, MailGap } from "./receive/intake.js";
export { Subscription, type LoadTest, type SubscribeOptions, type SubscriptionCounters } from "./receive/subscription.js";
export { TopicAdmin } from "./topics/admin.js";
export type { ChannelPartInfo, ChannelSettings, DeadMessage, TopicInfo, TopicSettings } from "./topics/admin.js";
export { DurableTopic, TopicWriter, type Body, type TopicLevel, type TopicSendOptions } from "./topics/durableTopic.js";
export type { ChannelInfo, Part, TopicSettingsInfo } from "./topics/map.js";
export { ChannelMember, ChannelMessage, type ChannelOptions } from "./topics/member.js";
export { TopicReader, type ReaderOptions, type ReaderPosition, type TopicGap } from "./topics/reader.js";
export { TopicReceipt } from "./topics/writer.js";
export { TopicMessage } from "./wire/block.js";
export { Message } from "./wire/record.js";
export type { Headers } from "./wire/headers.js";
