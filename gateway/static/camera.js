// The camera: a preview, and one JPEG whenever a chunk of audio goes out.

import { bytesToBase64 } from "./codec.js";

// What the browser raised on the way to the camera, told apart from what it says of a microphone.
export class CameraRefused extends Error {
  constructor(cause) {
    super(cause.message, { cause });
    this.name = cause.name;
  }
}

const JPEG_QUALITY = 0.7;
const MAX_SIDE = 1280;

export class Camera {
  constructor(video) {
    this.video = video;
    this.stream = null;
    this.canvas = document.createElement("canvas");
  }

  get isOn() {
    return this.stream !== null;
  }

  // deviceId: "" is the browser's choice. The camera that was on is let go. Raises CameraRefused.
  async start(deviceId) {
    const stream = await navigator.mediaDevices.getUserMedia({
      video: {
        width: { ideal: 1280 },
        height: { ideal: 720 },
        ...(deviceId ? { deviceId: { exact: deviceId } } : { facingMode: "user" }),
      },
    }).catch((error) => {
      throw new CameraRefused(error);
    });
    this.stop();
    this.stream = stream;
    this.video.srcObject = this.stream;
    this.video.hidden = false;
    await this.video.play();
  }

  stop() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    this.video.srcObject = null;
    this.video.hidden = true;
  }

  // Base64 of the present picture; null while the camera is off or shows nothing yet.
  async snapshot() {
    const { videoWidth: width, videoHeight: height } = this.video;
    if (!this.isOn || !width) return null;
    const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.getContext("2d").drawImage(this.video, 0, 0, this.canvas.width, this.canvas.height);
    const blob = await new Promise((done) => {
      this.canvas.toBlob(done, "image/jpeg", JPEG_QUALITY);
    });
    return blob && bytesToBase64(new Uint8Array(await blob.arrayBuffer()));
  }
}
