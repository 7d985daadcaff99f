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

// JSON of a route. Raises an Error with the service's own sentence.
export async function getJson(path) {
  const reply = await fetch(serviceUrl(path));
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new Error(typeof body.detail === "string" ? body.detail : `HTTP ${reply.status}`);
  }
  return reply.json();
}

// A key in the page's address is a cookie by now, which sockets and links carry by themselves; the
// address bar and the history need not keep it.
export function hideKey() {
  const address = new URL(location.href);
  address.searchParams.delete("api_key");
  address.searchParams.delete("token");
  if (address.href !== location.href) history.replaceState(null, "", address);
}
