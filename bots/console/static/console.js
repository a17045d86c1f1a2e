// Tells the console whether its page is visible, so that a hidden page asks the gateway for nothing.
document.addEventListener("visibilitychange", () => {
  if (window.did_handshake) emitEvent("visibility", document.visibilityState);
});

// Tells the console what is typed into the fields that belong to its buttons.
document.addEventListener("input", (event) => {
  const field = event.target.dataset?.field;
  if (field && window.did_handshake) emitEvent("field", { field, value: event.target.value });
});

// Light, dark, or as the system: shown at once, and kept in the session.
function nextTheme() {
  const themes = ["system", "light", "dark"];
  const now = document.documentElement.dataset;
  now.theme = themes[(themes.indexOf(now.theme) + 1) % themes.length];
  if (window.did_handshake) emitEvent("theme", now.theme);
}

document.addEventListener("click", (event) => {
  if (event.target.closest?.("button[data-theme]")) nextTheme();
  const shows = event.target.closest?.("[data-shows]");
  if (shows) document.getElementById(shows.dataset.shows).showModal();
  if (event.target.matches?.("dialog")) event.target.close(); // a click beside it
});

// The keys that the list "Keys" tells. After "g", a letter of a page goes there.
let going = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.repeat) return;
  if (event.target.closest?.("input:not([type=checkbox]), select, textarea")) return;
  if (document.querySelector(".q-dialog, dialog[open]")) return;
  const key = event.key.toLowerCase();
  const found = {
    "?": () => document.getElementById("keys").showModal(),
    "/": () => document.querySelector("main input:not([type=checkbox])")?.focus(),
    d: nextTheme,
    g: () => (going = true),
  }[key] ?? (() => document.querySelector(`main [data-key="${CSS.escape(key)}"]:not(.hidden)`)?.click());
  if (going) {
    going = false;
    document.querySelector(`nav.top [data-go="${CSS.escape(key)}"]`)?.click();
  } else if (key.length === 1) {
    found();
  } else return;
  event.preventDefault();
});
