// Addresses of the service, seen from a page of any depth, also behind a proxy's path.

const ROOT = new URL("../", import.meta.url);

export function serviceUrl(path) {
  return new URL(path, ROOT).href;
}

export function socketUrl(path) {
  const url = new URL(path, ROOT);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}

// What the service answered instead of what it was asked for, in its own sentence.
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// No answer at all: the service or the way to it is down.
export class Silence extends Error {}

// JSON of a route. Raises Refusal or Silence.
export function getJson(path) {
  return ask(path, {});
}

export function sendJson(method, path, body) {
  return ask(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

async function ask(path, options) {
  const reply = await fetch(serviceUrl(path), options).catch(({ message }) => {
    throw new Silence(message);
  });
  if (reply.ok) return reply.json();
  const { detail } = await reply.json().catch(() => ({}));
  throw new Refusal(reply.status, typeof detail === "string" ? detail : `HTTP ${reply.status}`);
}

// A key in the page's address is a cookie by now, which sockets and links carry by themselves; the
// address bar and the history need not keep it.
export function hideKey() {
  const address = new URL(location.href);
  address.searchParams.delete("api_key");
  address.searchParams.delete("token");
  if (address.href !== location.href) history.replaceState(null, "", address);
}
