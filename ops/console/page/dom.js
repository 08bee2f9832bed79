// Elements, tables and forms. Nothing that comes from the cluster is ever parsed as HTML.

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(name, String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export const count = (value) => (value === null || value === undefined ? "" : Number(value).toLocaleString("en"));

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 1) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return value < 172800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} d`;
}

export const time = (ms) => (ms ? new Date(ms).toISOString().replace("T", " ").slice(0, 19) : "");

// A table. columns: {name, show: row → text or element, number, text, sort: what the header's button asks for, sorted}.
export function table(caption, columns, rows, onsort = null) {
  const head = columns.map((column) => h("th", {
    scope: "col", class: column.number ? "number" : null, "aria-sort": column.sorted ? "descending" : null,
  }, column.sort && onsort ? h("button", { type: "button", onclick: () => onsort(column.sort) }, column.name) : column.name));
  const body = rows.map((row) => h("tr", {}, columns.map((column) => {
    const shown = column.show(row);
    return h("td", { class: column.number ? "number" : column.text ? "text" : null }, shown instanceof Node ? shown : String(shown ?? ""));
  })));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, rows.length ? caption : `${caption}: none`), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

// A form in one line. fields: {name, label, value, type, options, size, max}. Calls back with the values.
export function form(fields, button, onsubmit) {
  const inputs = fields.map((field) => {
    if (field.options) {
      const options = field.options.map(([value, text]) => h("option", { value, selected: value === field.value }, text));
      return h("select", { name: field.name }, options);
    }
    return h("input", {
      name: field.name, type: field.type ?? "text", value: field.type === "checkbox" ? null : field.value ?? "", size: field.size ?? 18,
      maxlength: field.max ?? 256, autocomplete: "off", spellcheck: "false", checked: field.type === "checkbox" && field.value,
    });
  });
  const labels = fields.map((field, index) => h("label", { class: field.type === "checkbox" ? "check" : null }, field.label, inputs[index]));
  return h("form", {
    class: "line",
    onsubmit: (event) => {
      event.preventDefault();
      onsubmit(Object.fromEntries(fields.map((field, index) =>
        [field.name, field.type === "checkbox" ? inputs[index].checked : inputs[index].value.trim()])));
    },
  }, labels, h("button", { type: "submit", class: "main" }, button));
}

export function say(text, bad = false) {
  const line = h("p", { class: bad ? "bad" : null }, text);
  document.getElementById("said").append(line);
  setTimeout(() => line.remove(), 8000);
}

// Ask before something is changed. Resolves to true or false.
export function sure(question, button) {
  return new Promise((done) => {
    const dialog = h("dialog", { "aria-label": question }, h("p", {}, question), h("form", { method: "dialog", class: "line" },
      h("button", { value: "no" }, "Cancel"), h("button", { value: "yes", class: "main" }, button)));
    dialog.addEventListener("close", () => { dialog.remove(); done(dialog.returnValue === "yes"); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
