/** Names of free topics, and filters of them. Source: docs/routing.md. */

import { InvalidArgument } from "./errors.js";

/** Check the name of a free topic or a filter; the gateway checks the rest. Throws `InvalidArgument`. */
export function checkFilter(topic: string): string {
  if (typeof topic !== "string" || topic === "" || topic.length > 4096) {
    throw new InvalidArgument("a topic is a text of 1 to 4,096 characters");
  }
  if (/^(room|user)\//.test(topic) || topic.startsWith("$")) {
    throw new InvalidArgument(`${topic.slice(0, 80)} is no free topic: rooms are given as rooms, messages to a user as chat`);
  }
  const levels = topic.split("/");
  if (levels.some((level, at) => /[+#]/.test(level) && !(level === "+" || (level === "#" && at === levels.length - 1)))) {
    throw new InvalidArgument("+ and # stand alone in their level, and # only in the last one");
  }
  return topic;
}

/** Check the name of a free topic that is published to. Throws `InvalidArgument`. */
export function checkTopic(topic: string): string {
  if (/[+#]/.test(checkFilter(topic))) {
    throw new InvalidArgument("a topic that is published to has no wildcards");
  }
  return topic;
}
