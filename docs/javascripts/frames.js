// The forward passes in frames of the home page have the theme of the site. It is sent as a
// message, because a page that is opened from disk has no access to the document of a frame.
const frames = document.querySelectorAll(".explain iframe");
const send = (frame) => {
  const theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  frame.contentWindow.postMessage({ theme }, "*");
};
for (const frame of frames) frame.addEventListener("load", () => send(frame));
const changed = new MutationObserver(() => frames.forEach(send));
changed.observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
frames.forEach(send);
