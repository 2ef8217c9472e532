package bucket

import "time"

// Origin is the first edge of key's windows since year 1.
func (d *Definition) Origin(key string) time.Time { return instant(d.origin(key)) }
