// Driver of MQTT.js in a page of a headless Chromium, over ws and wss. Arguments and output: tests/clients/script.py.
// The page comes from a server of this process, which the page sends what it found. BROWSER names another program.
"use strict";
const { spawn } = require("node:child_process");
const crypto = require("node:crypto");
const fs = require("node:fs");
const http = require("node:http");
const os = require("node:os");
const path = require("node:path");
const tls = require("node:tls");

const [host, port, transport, version, ca] = process.argv.slice(2);
const where = { url: `${transport}://${host}:${port}/mqtt`, version, options: {} };
const files = { "/mqtt.js": require.resolve("mqtt/dist/mqtt.min"), "/script.js": path.join(__dirname, "script.js") };
const PAGE = `<!doctype html><meta charset="utf-8"><script src="/mqtt.js"></script><script src="/script.js"></script><script>
play(mqtt, ${JSON.stringify(where)}).catch((error) => ({ driver: String(error) }))
  .then((found) => fetch("/found", { method: "POST", body: JSON.stringify({ ...found, agent: navigator.userAgent }) }));
</script>`;

// The browser does not know the authority: it is given the key of the certificate, which we check by the authority.
function pinned() {
  return new Promise((done, failed) => {
    const socket = tls.connect({ host, port: Number(port), ca: fs.readFileSync(ca) }, () => {
      const key = socket.getPeerX509Certificate().publicKey.export({ type: "spki", format: "der" });
      socket.destroy();
      done([`--ignore-certificate-errors-spki-list=${crypto.createHash("sha256").update(key).digest("base64")}`]);
    });
    socket.on("error", failed);
  });
}

async function main() {
  const home = fs.mkdtempSync(path.join(os.tmpdir(), "pixiu-browser-"));
  let browser;
  const end = (found) => {
    delete found.agent;
    console.log(JSON.stringify(found));
    if (browser) browser.kill("SIGKILL");
    fs.rmSync(home, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
    process.exit(0);
  };
  const server = http.createServer((request, response) => {
    if (request.method === "POST") {
      let body = "";
      request.on("data", (data) => { body += data; });
      request.on("end", () => { response.end(); end(JSON.parse(body)); });
    } else if (request.url === "/") {
      response.setHeader("Content-Type", "text/html").end(PAGE);
    } else if (files[request.url]) {
      response.setHeader("Content-Type", "text/javascript").end(fs.readFileSync(files[request.url]));
    } else {
      response.writeHead(404).end();
    }
  });
  await new Promise((done) => server.listen(Number(process.env.PAGE_PORT || 0), "127.0.0.1", done));
  const words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", `--user-data-dir=${home}`, ...(ca ? await pinned() : []), `http://127.0.0.1:${server.address().port}/`];
  browser = spawn(process.env.BROWSER || "chromium", words, { stdio: "ignore" });
  browser.on("error", (error) => end({ driver: `no browser: ${error.message}` }));
  browser.on("exit", (code) => end({ driver: `the browser ended with ${code}` }));
}
main().catch((error) => { console.log(JSON.stringify({ driver: String(error) })); process.exit(0); });
