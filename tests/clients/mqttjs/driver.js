// Driver of MQTT.js in Node. Arguments and output: tests/clients/script.py.
"use strict";
const fs = require("node:fs");
const mqtt = require("mqtt");
const { play } = require("./script.js");

const [host, port, transport, version, ca] = process.argv.slice(2);
const scheme = { tcp: "mqtt", tls: "mqtts", ws: "ws", wss: "wss" }[transport];
const url = `${scheme}://${host}:${port}${transport.startsWith("ws") ? "/mqtt" : ""}`;
play(mqtt, { url, version, options: ca ? { ca: fs.readFileSync(ca) } : {} }).then((found) => {
  console.log(JSON.stringify(found));
  process.exit(0);
});
