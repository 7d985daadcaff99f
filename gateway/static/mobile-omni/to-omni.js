// The full-duplex page fits a phone, so that phones get the same one. Its key and language go along.

import { serviceUrl } from "../address.js";

location.replace(serviceUrl(`omni${location.search}`));
