// Small values that this browser remembers; without storage they last as long as the page.

const fallback = new Map();

export function recall(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`omni.${name}`)) ?? otherwise;
  } catch {
    return fallback.get(name) ?? otherwise;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`omni.${name}`, JSON.stringify(value));
  } catch {
    fallback.set(name, value);
  }
}
