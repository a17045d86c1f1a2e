// Tells the console whether its page is visible, so that a hidden page asks the gateway for nothing.
document.addEventListener("visibilitychange", () => {
  if (window.did_handshake) emitEvent("visibility", document.visibilityState);
});

// Tells the console what is typed into the fields that belong to its buttons.
document.addEventListener("input", (event) => {
  const field = event.target.dataset?.field;
  if (field && window.did_handshake) emitEvent("field", { field, value: event.target.value });
});
