// Requests of the administration page, with the key that the operator has given.

import { serviceUrl } from "./address.js";

const STORED_AS = "omni_admin_key";
const TIMEOUT_MS = 10_000;

export class ApiError extends Error {
  // status: the reply's, or 0 when there was none.
  constructor(status, message, slug = "") {
    super(message);
    this.status = status;
    this.slug = slug;
  }

  // Another key would help: none was given, or one that is not an administrator's.
  get needsKey() {
    return this.status === 401 || this.slug === "forbidden";
  }
}

export function rememberKey(key) {
  sessionStorage.setItem(STORED_AS, key);
}

export function hasKey() {
  return sessionStorage.getItem(STORED_AS) !== null;
}

export function get(path) {
  return send("GET", path);
}

// The reply's JSON; what is no JSON comes as text.
export async function send(method, path, body) {
  const headers = {};
  const key = sessionStorage.getItem(STORED_AS);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method, headers, body: JSON.stringify(body), signal: AbortSignal.timeout(TIMEOUT_MS) };
  let reply;
  try {
    reply = await fetch(serviceUrl(path), options);
  } catch (error) {
    throw new ApiError(0, error.message);
  }
  const isJson = reply.headers.get("content-type")?.startsWith("application/json");
  const content = isJson ? await reply.json() : await reply.text();
  if (!reply.ok) {
    const said = typeof content?.detail === "string" ? content.detail : `HTTP ${reply.status}`;
    throw new ApiError(reply.status, said, content?.slug);
  }
  return content;
}
