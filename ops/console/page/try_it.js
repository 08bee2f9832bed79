// A client in the page: it connects, subscribes and publishes by MQTT, through the console to a gateway.
import { read } from "/page/api.js";
import { form, h, say } from "/page/dom.js";
import { Client } from "/page/mqtt.js";

const MAX_LINES = 500;

async function show(place, { session }) {
  const { gateways } = await read("gateways");
  if (!session.may_change) { place.replaceChildren(h("p", { class: "faint" }, "This page publishes, so it is for operators.")); return null; }
  if (!gateways.length) { place.replaceChildren(h("p", { class: "warn" }, "No gateway with an MQTT port is running.")); return null; }
  let client = null;
  const log = h("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Messages" });
  const note = (line) => {
    log.append(h("div", {}, `${new Date().toISOString().slice(11, 23)}  ${line}`));
    while (log.childElementCount > MAX_LINES) log.firstElementChild.remove();
    log.scrollTop = log.scrollHeight;
  };
  const usable = (work) => (values) => {
    if (!client) { say("connect first", true); return; }
    try { work(values); } catch (error) { say(error.message, true); }
  };
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  place.replaceChildren(
    form([
      { name: "gateway", label: "Gateway", options: gateways.map((each) => [String(each.replica), `${each.replica}: ${each.address}`]) },
      { name: "client", label: "Client ID", value: `console-${Math.random().toString(36).slice(2, 8)}`, max: 64 },
      { name: "user", label: "User" }, { name: "password", label: "Password or token", type: "password", max: 8192 },
    ], "Connect", (values) => {
      client?.close();
      client = new Client(`${scheme}://${location.host}/api/mqtt?gateway=${values.gateway}`, values, {
        open: () => note("connected"), subscribed: (granted) => note(granted === 128 ? "the subscription was refused" : "subscribed"),
        message: (topic, payload) => note(`${topic}  ${payload.slice(0, 2000)}`), closed: (why) => note(why),
      });
    }),
    form([{ name: "filter", label: "Subscribe to", value: "room/42", size: 30 }], "Subscribe", usable(({ filter }) => client.subscribe(filter))),
    form([
      { name: "topic", label: "Publish to", value: "room/42", size: 30 }, { name: "payload", label: "Message", value: "hello", size: 40, max: 4096 },
      { name: "retain", label: "retained", type: "checkbox" },
    ], "Publish", usable(({ topic, payload, retain }) => client.publish(topic, payload, retain))),
    log);
  return () => client?.close();
}

export default { name: "try", title: "Try it", every: 0, show };
