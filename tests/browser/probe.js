// Put into each page before its own scripts: counts what a page is sent, what its canvases draw, and how long it stalls.
(() => {
  const probe = (window.probe = {});
  probe.reset = () => Object.assign(probe, { bytes: 0, messages: 0, drawn: 0, frames: 0, longest_ms: 0, stalls: [] });
  probe.reset();
  const sizeOf = (data) => (typeof data === "string" ? data.length : data.byteLength ?? data.size ?? 0);
  window.WebSocket = new Proxy(window.WebSocket, {
    construct(target, args) {
      const socket = new target(...args);
      if (String(args[0]).includes("/channels")) {
        socket.addEventListener("message", (event) => { probe.bytes += sizeOf(event.data); probe.messages++; });
      }
      return socket;
    },
  });
  let stroked = false;
  const stroke = CanvasRenderingContext2D.prototype.stroke;
  CanvasRenderingContext2D.prototype.stroke = function (...args) {
    stroked ||= this.canvas.isConnected;
    return stroke.apply(this, args);
  };
  const frame = () => {
    probe.frames++;
    if (stroked) probe.drawn++; // frames in which a canvas in the page has changed
    stroked = false;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      probe.stalls.push(Math.round(entry.duration));
      probe.longest_ms = Math.max(probe.longest_ms, entry.duration);
    }
  }).observe({ entryTypes: ["longtask"] });
})();
