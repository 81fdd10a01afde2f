// Requests to the router, with the token where there is one: it stays in this tab, and in no address.

export function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { ...options, headers, cache: "no-store" });
}
