// Tells the console whether its page is visible, so that a hidden page asks the gateway for nothing.
document.addEventListener("visibilitychange", () => {
  if (window.did_handshake) emitEvent("visibility", document.visibilityState);
});
