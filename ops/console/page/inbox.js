// A user's inbox: lanes, devices, messages, dead letters.
import { change, read } from "/page/api.js";
import { count, form, h, say, sure, table, time } from "/page/dom.js";

async function show(place, { query, session, go }) {
  const search = form([{ name: "uin", label: "UIN", value: query.uin, max: 19 }], "Show", (values) => go("inbox", values));
  if (!query.uin) { place.replaceChildren(search); return; }
  const uin = query.uin;
  const may = session.may_change;
  const [state, first, normal, dead] = await Promise.all([
    read("inbox", { uin }), ...(may ? [read("inbox/entries", { uin, lane: 0 }), read("inbox/entries", { uin, lane: 1 }), read("inbox/dead", { uin })] : []),
  ]);
  const act = async (path, body, question, button, said) => {
    if (!await sure(question, button)) return;
    try { say(said(await change(path, { uin, ...body }))); await show(place, { query, session, go }); } catch (error) { say(error.message, true); }
  };
  const devices = state.lanes[0].devices.map((device, index) => ({ ...device, lanes: state.lanes.map((lane) => lane.devices[index]) }));
  const parts = [search,
    table("Lanes", [
      { name: "lane", show: (row) => (row.lane === 0 ? "first" : "normal") }, { name: "newest", number: true, show: (row) => count(row.last) },
      { name: "can be read", number: true, show: (row) => count(row.readable) },
    ], state.lanes),
    table("Devices", [
      { name: "device", number: true, show: (row) => row.device }, { name: "name", text: true, show: (row) => row.name || row.device_id },
      { name: "seen", show: (row) => time(row.seen_s * 1000) }, { name: "waited for", show: (row) => (row.counts ? "yes" : "no") },
      { name: "unread, first", number: true, show: (row) => count(row.lanes[0]?.unread) },
      { name: "unread, normal", number: true, show: (row) => count(row.lanes[1]?.unread) },
      { name: "", show: (row) => h("button", { type: "button", disabled: !may, "aria-label": `Remove device ${row.device}`,
        onclick: () => act("inbox/drop-device", { device: row.device }, `Remove device ${row.device} of ${uin}? Nothing waits for it then.`, "Remove",
          () => `nothing waits for device ${row.device} any longer`) }, "Remove") },
    ], devices)];
  if (!may) { place.replaceChildren(...parts, h("p", { class: "faint" }, "What messages say is shown to operators.")); return; }
  const entries = [...first.lanes[0].entries.map((entry) => ({ ...entry, lane: "first" })), ...normal.lanes[0].entries.map((entry) => ({ ...entry, lane: "normal" }))];
  const letter = (body, row, question, button, said) => act(`inbox/${body}`, { letter: row.id }, question, button, said);
  place.replaceChildren(...parts,
    table("Newest entries", [
      { name: "lane", show: (row) => row.lane }, { name: "number", number: true, show: (row) => row.seq }, { name: "sent", show: (row) => time(row.sent_at_ms) },
      { name: "sender", number: true, show: (row) => row.sender ?? "" }, { name: "message", text: true, show: (row) => row.text ?? row.hex ?? row.code ?? "" },
    ], entries),
    table("Dead letters", [
      { name: "id", text: true, show: (row) => row.id }, { name: "device", show: (row) => row.device ?? "" },
      { name: "given up", show: (row) => time(row.failed_at_ms) }, { name: "attempts", number: true, show: (row) => row.attempts ?? "" },
      { name: "reason", text: true, show: (row) => row.reason ?? row.code ?? "" }, { name: "message", text: true, show: (row) => row.original?.text ?? row.original?.hex ?? "" },
      { name: "", show: (row) => h("button", { type: "button", "aria-label": `Resend ${row.id}`, onclick: () => letter("resend", row, `Send the mail of ${row.id} again?`, "Resend",
        (said) => `sent again: ${said.sent}`) }, "Resend") },
      { name: "", show: (row) => h("button", { type: "button", "aria-label": `Delete ${row.id}`, onclick: () => letter("drop", row, `Delete the dead letter ${row.id}?`, "Delete",
        (said) => `deleted: ${said.deleted}`) }, "Delete") },
    ], dead.dead_letters));
}

export default { name: "inbox", title: "Inbox", every: 0, show };
