// The book's search for pages that are opened as files.
//
// The theme searches in a worker, and browsers start no worker for a page whose address begins with
// "file:". So for such pages `Worker` is a class that runs the worker's script in a hidden frame.
// The theme's script looks for the name `IFrameWorker`. Nothing is fetched from elsewhere.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      // What the worker posts arrives here as a message of this object.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const run = (source) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: loaded, onerror: failed });
          inside.document.body.append(script);
        });
      inside.importScripts = (...sources) => Promise.all(sources.map(run));
      this.inside = inside;
      this.ready = run(new URL(address, location.href).href);
    }

    postMessage(data) {
      // A worker takes messages once its script has run.
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
