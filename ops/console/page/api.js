// Calls of the console's API. Every error is one sentence.

export class ApiError extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function answer(response) {
  let body = {};
  try { body = await response.json(); } catch { /* no JSON: the status says it */ }
  if (response.ok) return body;
  throw new ApiError(response.status, body.error?.text ?? `the console answered ${response.status}`);
}

async function call(path, options) {
  let response;
  try { response = await fetch(`/api/${path}`, options); } catch { throw new ApiError(0, "the console does not answer"); }
  return answer(response);
}

export function read(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const words = new URLSearchParams(given).toString();
  return call(words ? `${path}?${words}` : path, {});
}

export function change(path, body) {
  return call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
