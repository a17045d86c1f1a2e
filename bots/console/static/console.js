// Tells the console what happened here. A page is used before it is connected: that is told when it is, in this order
// and before the clicks on its buttons, which wait for the connection too.
function tell(event, value) {
  if (window.did_handshake) emitEvent(event, value);
  else window.socket?.once("connect", () => emitEvent(event, value));
}

// A hidden page asks the gateway for nothing.
document.addEventListener("visibilitychange", () => tell("visibility", document.visibilityState));

// What is typed into the fields that belong to its buttons.
document.addEventListener("input", (event) => {
  const field = event.target.dataset?.field;
  if (field) tell("field", { field, value: event.target.value });
});

// The zone of this reader, in which charts tell times. The page connects only after this script was read.
document.addEventListener("DOMContentLoaded", () => tell("zone", Intl.DateTimeFormat().resolvedOptions().timeZone));

// Light, dark, or as the system: shown at once, and kept in the session.
function nextTheme() {
  const themes = ["system", "light", "dark"];
  const now = document.documentElement.dataset;
  now.theme = themes[(themes.indexOf(now.theme) + 1) % themes.length];
  tell("theme", now.theme);
}

// The exact time, in the zone of this reader, of what is told as "5 min ago".
document.addEventListener("mouseover", (event) => {
  const shown = event.target.closest?.("time[datetime]");
  if (shown) shown.title = new Date(shown.dateTime).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
});

// The chosen rows of a table, and lists that lead to another page.
document.addEventListener("change", ({ target }) => {
  const boxes = [...document.querySelectorAll("main [data-choose]")];
  if ("chooseAll" in target.dataset) boxes.forEach((box) => (box.checked = target.checked));
  if ("choose" in target.dataset || "chooseAll" in target.dataset)
    tell("chosen", boxes.filter((box) => box.checked).map((box) => box.dataset.choose));
  if ("goes" in target.dataset) location.href = target.value;
});

document.addEventListener("click", (event) => {
  if (event.target.closest?.("nav.top .menu")) event.target.closest("nav").toggleAttribute("data-open");
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
