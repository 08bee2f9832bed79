// The console's frame: who is logged in, which page is shown, and when it is shown again.
import { ApiError, change, read } from "/page/api.js";
import { form, h, say } from "/page/dom.js";
import bridges from "/page/bridges.js";
import clients from "/page/clients.js";
import growth from "/page/growth.js";
import inbox from "/page/inbox.js";
import map from "/page/map.js";
import paths from "/page/paths.js";
import rooms from "/page/rooms.js";
import security from "/page/security.js";
import topics from "/page/topics.js";
import tryIt from "/page/try_it.js";

// Each page: {name, title, show(place, context), every: ms, or 0}. `show` may return a function that ends it.
const PAGES = [map, clients, rooms, inbox, topics, paths, growth, bridges, security, tryIt];
const main = document.getElementById("content");
let session = {};
let timer = 0;
let end = null;
let turn = 0;

function address() {
  const [name, ...words] = location.hash.slice(1).split("?");
  return { page: PAGES.find((page) => page.name === name) ?? PAGES[0], query: Object.fromEntries(new URLSearchParams(words.join("?"))) };
}

export function go(name, query = {}) {
  location.hash = `${name}?${new URLSearchParams(query)}`;
}

function frame() {
  const { page } = address();
  document.getElementById("nav").replaceChildren(...PAGES.map((each) =>
    h("a", { href: `#${each.name}`, "aria-current": each === page ? "page" : null }, each.title)));
  const who = document.getElementById("who");
  who.replaceChildren(session.user || "no login", session.may_change ? "" : " (may look)");
  if (session.login_required && session.logged_in) who.append(h("button", { type: "button", onclick: logOut }, "Log out"));
}

async function logOut() {
  await change("logout", {});
  begin();
}

function askLogin() {
  main.replaceChildren(h("h1", {}, "Log in"),
    h("p", {}, "Give the token that `pixiu console` printed, or one of the cluster's tokens."),
    form([{ name: "token", label: "Token", type: "password", size: 60, max: 8192 }], "Log in", async ({ token }) => {
      try { await change("login", { token }); begin(); } catch (error) { say(error.message, true); }
    }));
  main.querySelector("input").focus();
}

async function show(again) {
  clearTimeout(timer);
  const { page, query } = address();
  const mine = ++turn;
  if (!again) {
    if (end) end();
    end = null;
    document.title = `${page.title} – Pixiu console`;
    main.replaceChildren(h("h1", {}, page.title), h("div", { id: "page" }));
    main.scrollIntoView();
    frame();
  }
  try {
    const shown = await page.show(document.getElementById("page"), { query, session, again, go });
    if (mine === turn && typeof shown === "function") end = shown;
  } catch (error) {
    if (mine !== turn) return;
    if (error instanceof ApiError && error.status === 401) { begin(); return; }
    if (!(error instanceof ApiError)) console.error(error);
    let line = document.getElementById("failure");
    if (!line) { line = h("p", { id: "failure", class: "bad" }); main.append(line); }
    line.textContent = error.message;
    if (mine === turn && page.every) timer = setTimeout(() => show(true), page.every);
    return;
  }
  if (mine !== turn) return;
  document.getElementById("failure")?.remove();
  // Nothing is asked while nobody looks.
  if (page.every && !document.hidden) timer = setTimeout(() => show(true), page.every);
}

async function begin() {
  const found = location.hash.match(/^#token=([A-Za-z0-9_-]+)$/);
  if (found) {
    history.replaceState(null, "", "/");
    try { await change("login", { token: found[1] }); } catch (error) { say(error.message, true); }
  }
  try { session = await read("session"); } catch (error) { say(error.message, true); return; }
  frame();
  if (session.logged_in) show(false);
  else askLogin();
}

window.addEventListener("hashchange", () => { if (/^#token=/.test(location.hash)) begin(); else if (session.logged_in) show(false); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && session.logged_in && address().page.every) show(true); });
begin();
